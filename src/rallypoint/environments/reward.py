"""The reward function: one that ships with the package, or any function in a file of the user's.

Owns: finding, loading and checking the function. Must not know: batches, tensors; what a score means. Every process
that scores imports this, so it needs the standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from rallypoint.environments.given import GIVEN, how_to_give, is_given
from rallypoint.errors import RewardError, UserCodeError
from rallypoint.extras import find_unusable
from rallypoint.user_code import UserFunction, own_signature, split, written_signature

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What every function is called with, by name."""
PLURAL_PARAMETERS = tuple(f"{name}s" for name in PARAMETERS)
"""What a function of several responses is called with, each a list with an entry for each response."""
MORE_PARAMETERS = (
    *("token_ids", "tokens", "logprobs", "messages", "finish_reason"),
    *("turns", "metrics", "prompt_index", "sample_index", "groups"),
)
"""What a function is called with besides if it names them; `groups` makes one of several responses that of a batch."""
_SIGNATURE = f"({', '.join(PARAMETERS[:-1])}, extra_info=None), and any of {', '.join(MORE_PARAMETERS[:-1])}"

Scope = Literal["response", "group", "batch"]
"""What a function is called with at once: one response, those of one prompt, or all of a step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wants:
    """What a function is to be called with, as its parameters say."""

    scope: Scope = "response"
    more: tuple[str, ...] = ()
    """Those of MORE_PARAMETERS that it names."""


class RewardFunction(Protocol):
    """Scores one response; it is called with all arguments by name, those of MORE_PARAMETERS included that it names.

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


_HERE = "rallypoint.environments.shipped"
SHIPPED: dict[str, str] = {
    "digits": "rallypoint.data.digits:score_digits",
    "exact": f"{_HERE}.answers:exact",
    "gsm8k": f"{_HERE}.answers:gsm8k",
    "math": f"{_HERE}.answers:math",
    "multiple_choice": f"{_HERE}.answers:multiple_choice",
    "reasoning_gym": f"{_HERE}.answers:reasoning_gym",
    "json_schema": f"{_HERE}.form:json_schema",
    "regex": f"{_HERE}.form:regex",
    "length": f"{_HERE}.form:length",
    "code": f"{_HERE}.code:code",
    "judge": f"{_HERE}.judge:judge",
}
"""Module and function of every reward that ships, by its name; docs/reward.md says what each does."""
_CHECKS: dict[str, str] = {"regex": f"{_HERE}.form:regex_problem"}
"""Module and function that say what is wrong with a shipped reward's parameters, beyond their names."""
NEEDS: dict[str, tuple[str, str]] = {
    "math": ("math_verify", "math"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym"),
    "json_schema": ("jsonschema", "json"),
}
"""Module that a shipped reward needs besides, and the extra that installs it."""


def check_reward_spec(spec: str, parameters: Mapping[str, object] | None = None) -> str | None:
    """Return what is wrong with a reward's name or parameters, from the file's text alone; None if nothing is seen.

    Nothing of the user's is run or imported, so that it is quick, and safe at any time.
    """
    if is_given(spec):
        if spec not in GIVEN:
            return how_to_give(spec)
        return _find_signature_problem(spec, own_signature(GIVEN[spec].function), parameters or {})
    if spec in SHIPPED:
        if spec in NEEDS and (unusable := find_unusable(*NEEDS[spec])) is not None:
            return f"it {unusable}"
        problem = _find_signature_problem(spec, own_signature(_imported(SHIPPED[spec])), parameters or {})
        return problem or (_imported(_CHECKS[spec])(parameters or {}) if spec in _CHECKS else None)
    try:
        signature = written_signature(*_split(spec))
    except UserCodeError as error:
        return str(error)
    return None if signature is None else _find_signature_problem(spec, signature, parameters or {})


def load_reward(spec: str, parameters: Mapping[str, object] | None = None) -> RewardFunction:
    """Return the reward function that `spec` names: one that ships, or "path/to/file.py:function".

    A file is imported into this process, where it may do anything, or never end: `child.py` starts a process for it.

    Args:
        spec: of the function.
        parameters: further arguments of it, by name.

    Raises:
        RewardError: there is no such file or function, the file raises while it is imported, or the function
            cannot be called with (data_source, solution_str, ground_truth, extra_info) and the parameters.
    """
    function = _imported(SHIPPED[spec]) if spec in SHIPPED else _load_own(spec)
    if problem := _find_signature_problem(spec, own_signature(function), parameters or {}):
        raise RewardError(problem)
    return cast("RewardFunction", functools.partial(function, **parameters) if parameters else function)


def opens_sandbox(spec: str) -> bool:
    """Whether a function of the user's says `open_sandbox()` somewhere in its text, or that of its file."""
    if spec in SHIPPED:
        return False
    try:
        text = GIVEN[spec].text if spec in GIVEN else UserFunction.read(spec, {}).text.decode(errors="replace")
    except UserCodeError:
        return False
    return re.search(r"\bopen_sandbox\(\s*\)", text) is not None


def _imported(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _load_own(spec: str) -> Callable[..., object]:
    try:
        _split(spec)
        return UserFunction.read(spec, {}).load()
    except UserCodeError as error:
        raise RewardError(str(error)) from error.__cause__


def wants_of(function: Callable[..., object]) -> Wants:
    """Return what a function is to be called with.

    >>> wants_of(lambda solution_str, tokens, **others: 0.0)
    Wants(scope='response', more=('tokens',))
    >>> wants_of(lambda data_sources, solution_strs, ground_truths, extra_infos: [0.0]).scope
    'group'
    """
    return _wants(own_signature(function))


def find_stranger(spec: str, parameters: Iterable[str], own: Collection[str]) -> str | None:
    """Say which parameter something does not have, and which may be meant; None if it has all."""
    stranger = next((name for name in parameters if name not in own), None)
    if stranger is None:
        return None
    near = difflib.get_close_matches(stranger, own, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(own) or 'none'}"
    return f"{spec} has no parameter {stranger!r}; {hint}"


def _split(spec: str) -> tuple[Path, str]:
    return split(spec, shipped=SHIPPED, usual_name="compute_score")


def _wants(signature: inspect.Signature) -> Wants:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name for name, parameter in signature.parameters.items() if parameter.kind in by_name}
    if "solution_strs" not in named:
        return Wants("response", tuple(name for name in MORE_PARAMETERS[:-1] if name in named))
    return Wants("batch" if "groups" in named else "group", tuple(name for name in MORE_PARAMETERS if name in named))


def _find_signature_problem(spec: str, signature: inspect.Signature, parameters: Mapping[str, object]) -> str | None:
    wants = _wants(signature)
    given = [*(PARAMETERS if wants.scope == "response" else PLURAL_PARAMETERS), *wants.more]
    if taken := sorted(parameters.keys() & {*given, *MORE_PARAMETERS}):
        return f"the parameter {taken[0]!r} of {spec} is an argument that every call gives: take another name"
    own = [name for name in signature.parameters if name not in given]
    try:
        signature.bind(**dict.fromkeys([*given, *parameters]))
    except TypeError as error:
        if problem := find_stranger(spec, parameters, own):
            return problem
        declared = signature.parameters.values()
        missing = [one.name for one in declared if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
        if needed := [name for name in missing if name not in (*given, *parameters)]:
            return f"{spec} needs the parameter {needed[0]!r}: set reward.parameters={{{needed[0]}: ...}}"
        takes = ", ".join(str(one.replace(annotation=one.empty, default=one.empty)) for one in declared)
        return f"{spec} takes ({takes}), expected {_SIGNATURE}: {error}"
    return None
