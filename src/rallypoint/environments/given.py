"""Functions that Python gives to `rally.train`: known by name in this process; how reward functions are then called.

Owns: which name stands for which function, what of a row a function is called with, and whether it can be sent to a
process. Must not know: batches, tensors. It needs the standard library, and cloudpickle where a function is sent.

A function of the arguments of docs/reward.md is called with those. Any other one is called by its own names: the
response is `completion`, `response` or `solution_str`; the prompt is `prompt`; every other name is a column of the row.
In the plural (`completions`) it is called with lists, once for the responses of a prompt, and returns a list.
`completion_ids` is TRL's name for `token_ids`; the other arguments of docs/reward.md keep their names.

    lambda completion, answer: float(completion == answer)
    def brevity(completions, **columns): return [-len(text) for text in completions]
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, SupportsIndex

from rallypoint.errors import RewardError
from rallypoint.user_code import own_signature

_MARK = "@"
_MAX_BYTES = 64 * 2**20
"""Most that is sent to each process: a function that refers to more holds a model, or the data."""
_USUAL = ("data_source", "solution_str", "ground_truth", "extra_info")
_RESPONSE = ("completion", "response", "solution_str")
_IDS = "completion_ids"
_FURTHER = (
    *("token_ids", "tokens", "logprobs", "finish_reason"),
    *("turns", "metrics", "prompt_index", "sample_index"),
)
"""Arguments that a call has only for a function that names them. A column of such a name goes before them."""
ONLY_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL's trainers give a reward function besides, and a run here does not."""
_ANSWERS = ("answer", "solution", "final_answer", "expected_answer", "target", "output", "label")
"""Columns that other data sets have for our `ground_truth`."""


class ConversationText(str):
    """The text of a conversation's only message, which TRL's functions read as `completion[0]["content"]`.

    >>> said = ConversationText("no")
    >>> said, said[0]["content"], said[-1]["content"], said[1:], len(said)
    ('no', 'no', 'no', 'o', 2)
    """

    __slots__ = ("role",)

    def __new__(cls, text: str, role: str = "assistant") -> Self:
        """Hold a text that has a role."""
        made = super().__new__(cls, text)
        made.role = role
        return made

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        found = super().__getitem__(place) if self or isinstance(place, slice) else ""
        is_message = not isinstance(place, slice) and operator.index(place) in (0, -1)
        return _Message(found, {"role": self.role, "content": str(self)}) if is_message else found

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class _Message(str):
    """A character, which is also the message that it is of."""

    __slots__ = ("_entries",)

    def __new__(cls, character: str, entries: Mapping[str, str]) -> Self:
        made = super().__new__(cls, character)
        made._entries = entries
        return made

    def __getitem__(self, place: SupportsIndex | slice | str) -> str:
        return self._entries[place] if isinstance(place, str) else super().__getitem__(place)


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A function, and what became of the attempt to send it."""

    function: Callable[..., object]
    """Called as a reward function in a file is."""
    text: str
    """Its source, or what stands for it; for records, never run."""
    code: bytes | None
    """The pickle that a process is sent; None if it stays here."""
    why_here: str = ""
    """The reason for that, a few words."""

    @property
    def digest(self) -> str:
        """Digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]


GIVEN: dict[str, Given] = {}
"""The functions of the calls under way, by the names that configs have for them."""


def is_given(spec: str | None) -> bool:
    """Whether a reward's name stands for a function that Python gave.

    >>> is_given("@reward"), is_given("rewards.py:reward")
    (True, False)
    """
    return spec is not None and spec.startswith(_MARK)


def how_to_give(spec: str, what: Literal["reward", "episode"] = "reward") -> str:
    """Say why a name stands for nothing in this process, and what to do."""
    in_file = {"reward": "reward.function=rewards.py:FUNCTION", "episode": "rollout.episode=episodes.py:FUNCTION"}
    return (
        f"{spec} was given to rally.train in Python and is not kept: give it again, with "
        f"rally.train(RUN_FOLDER, resume=True, {what}={spec.removeprefix(_MARK).partition('-')[0]}), or put it into a "
        f"file and name it, {in_file[what]}"
    )


def how_to_give_for_eval(spec: str, what: Literal["reward", "episode"] = "reward") -> str:
    """Say the same to who scores the model of a run."""
    own = spec.removeprefix(_MARK).partition("-")[0]
    return (
        f"the {what} of this run, {own}, was given to rally.train in Python and is not kept: give it again: "
        f"rally.evaluate(run, rows, {what}={own}), or put it into a file and name it: --{what} {what}s.py:FUNCTION"
    )


@contextlib.contextmanager
def giving(function: Callable[..., object]) -> Iterator[str]:
    """Yield the name under which configs may name a reward function as long as the block lasts."""
    called = _as_called(function)
    with named(function, called, *packed(called)) as spec:
        yield spec


@contextlib.contextmanager
def named(
    function: Callable[..., object],
    called: Callable[..., object] | None = None,
    code: bytes | None = None,
    why_here: str = "",
) -> Iterator[str]:
    """Yield a name for a function as long as the block lasts.

    Args:
        function: that Python gave.
        called: what is called for it; None for the function itself.
        code: see `Given`, as `why_here`.
        why_here: likewise.
    """
    own = str(getattr(function, "__name__", type(function).__name__)).strip("<>")
    names = (f"{_MARK}{own}", *(f"{_MARK}{own}-{number}" for number in range(2, 1000)))
    given = Given(called or function, _text(function), code, why_here)
    # In one step, for another thread may start a run with a function of the same name.
    spec = next(name for name in names if GIVEN.setdefault(name, given) is given)
    try:
        yield spec
    finally:
        del GIVEN[spec]


def loaded(
    code: bytes | None, parameters: Mapping[str, object], what: str = "the reward function"
) -> Callable[..., object]:
    """Return a function that was sent to this process by its driver; `what` it is, for messages.

    Raises:
        RewardError: it refers to what this process does not have.
    """
    try:
        function = pickle.loads(code or b"")
    except Exception as error:
        raise RewardError(
            f"{what} cannot be loaded in a process of its own: {type(error).__name__}: {error}; define it "
            "in the script or the notebook itself, or in a module that any process finds on sys.path"
        ) from error
    return functools.partial(function, **parameters) if parameters else function


@dataclasses.dataclass(frozen=True)
class ByName:
    """A function that is called with the arguments that it names."""

    function: Callable[..., object]
    names: tuple[str, ...]
    """Its arguments, those in the plural as they are."""
    required: tuple[str, ...]
    takes_all: bool
    """Whether it takes the other columns, too."""
    is_plural: bool

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a row must have for it."""
        usual = {*_USUAL, *_RESPONSE, *_ANSWERS, *map(_plural, (*_RESPONSE, "prompt")), "prompt", _IDS, *_FURTHER}
        return tuple(name for name in self.required if name not in usual)

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments of a reward function, which it is called with."""
        names = [_plural(name) for name in _USUAL] if self.is_plural else [*_USUAL]
        kind = inspect.Parameter.KEYWORD_ONLY
        of_trl = {_IDS} if self.takes_all and self.is_plural else set[str]()
        wanted = {"token_ids" if name == _IDS else name for name in {*self.names, *of_trl}}
        further = [name for name in _FURTHER if name in wanted]
        return inspect.Signature([inspect.Parameter(name, kind) for name in (*names, "messages", *further)])

    def __call__(self, **usual: Any) -> object:
        """Call it for one response, or for those of a group."""
        if not self.is_plural:
            return self.function(**self._chosen(usual))
        singular = dict(zip(map(_plural, _USUAL), _USUAL, strict=True))
        rows = [
            dict(zip([singular.get(name, name) for name in usual], row, strict=True))
            for row in zip(*usual.values(), strict=True)
        ]
        chosen = [self._chosen(row) for row in rows]
        return self.function(**{name: [each.get(name) for each in chosen] for name in chosen[0]})

    def _chosen(self, usual: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for one response, under the function's own names."""
        columns: Mapping[str, Any] = usual["extra_info"]
        further = {name: usual[name] for name in _FURTHER if name in usual}
        if "token_ids" in further:
            further[_IDS] = further["token_ids"]
        found = {**further, **columns, **{name: usual[name] for name in _USUAL}, "prompt": _prompt(usual["messages"])}
        found |= dict.fromkeys(_RESPONSE, ConversationText(usual["solution_str"]))
        plural = {_plural(name): name for name in (*_RESPONSE, "prompt")} if self.is_plural else {}
        chosen: dict[str, Any] = {}
        for name in self.names:
            own = plural.get(name, name)
            if own in found:
                chosen[name] = found[own]
            elif own in _ANSWERS:
                chosen[name] = usual["ground_truth"]
            elif name in self.required:
                there = ", ".join(columns) or "none"
                raise TypeError(f"the reward function names {name!r}; columns of the row besides the usual: {there}")
        if not self.takes_all:
            return chosen
        of_trl = {one: name for one, name in plural.items() if one in ("prompts", "completions")}
        of_trl |= {_IDS: _IDS} if self.is_plural else {}
        return {**columns, **{one: found[name] for one, name in of_trl.items()}, **chosen}


def _as_called(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that can be called as one in a file is, where it cannot be already."""
    parameters = own_signature(function).parameters
    if {"solution_str", "ground_truth"} <= parameters.keys() or "solution_strs" in parameters:
        return function
    named = [one for one in parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return ByName(
        function,
        names=tuple(one.name for one in named),
        required=tuple(one.name for one in named if one.default is one.empty),
        takes_all=any(one.kind is one.VAR_KEYWORD for one in parameters.values()),
        is_plural=any(one.name in map(_plural, _RESPONSE) for one in named),
    )


def packed(function: Callable[..., object]) -> tuple[bytes | None, str]:
    """Return the pickle of a function with all that it refers to, or None and the reason."""
    try:
        import cloudpickle  # here, because a process that scores has nothing to send

        code: bytes = cloudpickle.dumps(function)
    except Exception as error:  # noqa: BLE001 - whatever it refers to may raise anything; it stays here then
        return None, str(error).partition("\n")[0] or type(error).__name__
    if len(code) > _MAX_BYTES:
        return None, f"with what it refers to it has {len(code) / 2**20:,.0f} MiB"
    return code, ""


def _text(function: Callable[..., object]) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):  # typed into an interpreter, or no function but an object
        code = getattr(function, "__code__", None)
        return repr((code.co_code, code.co_names, code.co_consts)) if code else repr(type(function))


def _plural(name: str) -> str:
    return f"{name}s"


def _prompt(messages: Sequence[Mapping[str, Any]]) -> object:
    """Return the text of a prompt of one message, and the messages of any other."""
    return ConversationText(messages[0]["content"], messages[0]["role"]) if len(messages) == 1 else list(messages)
