"""The reward function: one that ships with the package, or any function in a file of the user's.

Owns: finding, loading and checking the function. Must not know: batches, tensors; what a score means. Every process
that scores imports this, so it needs the standard library only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from rallypoint.errors import RewardError, UserCodeError
from rallypoint.user_code import UserFunction, own_signature, split, written_signature

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What every function is called with, by name."""
TOKEN_PARAMETERS = ("token_ids", "tokens")
"""What a function is called with besides if it names them."""
_SIGNATURE = f"({', '.join(PARAMETERS[:-1])}, extra_info=None), and {' and '.join(TOKEN_PARAMETERS)} if it wants them"


class RewardFunction(Protocol):
    """Scores one response; it is called with all arguments by name, those of TOKEN_PARAMETERS included that it names.

    Returns a number, an object with a number under "score" (other numbers in it become metrics), or a list
    with one score for each token of the response; or, if it is async, one of these after it was awaited.
    """

    def __call__(
        self,
        *,
        data_source: str,
        solution_str: str,
        ground_truth: Any,  # whatever the user's data hold
        extra_info: Any,
    ) -> object:
        """Return the score, or the scores."""
        ...


def no_function(*, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:  # noqa: ARG001
    """Score every response 0: what is added to a reward model's score where there is no function."""
    return 0.0


def _digits() -> RewardFunction:
    from rallypoint.data.digits import score_digits  # its package brings numpy along

    return score_digits


SHIPPED: dict[str, Callable[[], RewardFunction]] = {"digits": _digits}


def check_reward_spec(spec: str) -> str | None:
    """Say what is wrong with a reward's name, from the file's text alone; None when nothing can be seen.

    Nothing is run or imported, so that it is quick, and safe at any time.
    """
    if spec in SHIPPED:
        return None
    try:
        signature = written_signature(*_split(spec))
    except UserCodeError as error:
        return str(error)
    return None if signature is None else _find_signature_problem(spec, signature)


def load_reward(spec: str) -> RewardFunction:
    """Return the reward function that `spec` names: "digits", or "path/to/file.py:function".

    A file is imported into this process, where it may do anything, or never end: `child.py` starts a process for it.

    Raises:
        RewardError: there is no such file or function, the file raises while it is imported, or the function
            cannot be called with (data_source, solution_str, ground_truth, extra_info).
    """
    if spec in SHIPPED:
        return SHIPPED[spec]()
    try:
        _split(spec)
        function = UserFunction.read(spec, {}).load()
    except UserCodeError as error:
        raise RewardError(str(error)) from error.__cause__
    problem = _find_signature_problem(spec, own_signature(function))
    if problem is not None:
        raise RewardError(problem)
    return cast("RewardFunction", function)


def wanted_tokens(function: Callable[..., object]) -> tuple[str, ...]:
    """Return which of the arguments about tokens a function names.

    >>> wanted_tokens(lambda solution_str, tokens, **others: 0.0)
    ('tokens',)
    """
    return _named_tokens(own_signature(function))


def _split(spec: str) -> tuple[Path, str]:
    return split(spec, shipped=SHIPPED, usual_name="compute_score")


def _named_tokens(signature: inspect.Signature) -> tuple[str, ...]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = signature.parameters
    return tuple(name for name in TOKEN_PARAMETERS if name in parameters and parameters[name].kind in by_name)


def _find_signature_problem(spec: str, signature: inspect.Signature) -> str | None:
    try:
        signature.bind(**dict.fromkeys([*PARAMETERS, *_named_tokens(signature)]))
    except TypeError as error:
        return f"{spec} takes ({', '.join(signature.parameters)}), expected {_SIGNATURE}: {error}"
    return None
