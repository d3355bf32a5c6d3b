"""Values of Python as the overrides of a config, as if they were typed on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from rallypoint.config import COMMAND_LINE, read
from rallypoint.errors import ConfigError, RallyError
from rallypoint.prepare.from_python import plain

HERE = "rally.train"
ErrorT = TypeVar("ErrorT", bound=RallyError)
_WORDS = (
    (rf"([(, ]){COMMAND_LINE}([,)])", rf"\1{HERE}\2"),
    (r"rally train (\S.*?) --resume --from-step (\d+)", r"rally.train('\1', resume=True, from_step=\2)"),
    (r"rally train (\S.*?) --resume", r"rally.train('\1', resume=True)"),
    (r"--resume --from-step (\d+)", r"resume=True, from_step=\1"),
    ("--from-step", "from_step"),
    ("--resume", "resume=True"),
    (r"--reward (\S+:\S+)", r"reward='\1'"),
    (r"start one with `rally train ([^`]+)`", r"start one with `rally.train('\1', ...)`"),
    ("--max-response-tokens", "max_response_tokens"),
    ("--trust-remote-code", "trust_remote_code=True"),
)
"""Patterns of what messages tell users of the command, and what they tell users of Python."""


def overrides_of(values: Mapping[str, object]) -> list[str]:
    """Return values by dotted key as overrides.

    Raises:
        ConfigError: a value is of a type that no key takes.

    >>> overrides_of({"trainer.num_steps": 3, "actor": {"optimizer": {"lr": 1e-6}}, "kl": None})
    ['trainer.num_steps=3', 'actor={"optimizer": {"lr": 1e-06}}', 'kl=null']
    """
    problems: list[str] = []
    overrides: list[str] = []
    for key, value in values.items():
        try:
            overrides.append(f"{key}={json.dumps(value, default=plain, ensure_ascii=False)}")
        except TypeError:
            problems.append(
                f"{key} ({HERE}): expected a number, a text, a list or a dict, found {type(value).__name__}"
            )
    if problems:
        raise ConfigError(tuple(problems))
    return overrides


def of_length(recipe: str, overrides: Sequence[str]) -> list[str]:
    """Return the override that takes back the epochs of a recipe, if steps are set; epochs would go before them.

    >>> of_length("sft", ["trainer.num_steps=3"]), of_length("sft", []), of_length("grpo", ["trainer.num_steps=3"])
    (['trainer.num_epochs=null'], [], [])

    Raises:
        ConfigError: a file cannot be read or an override cannot be parsed.
    """
    source = read(recipe, overrides)
    trainer = cast("Mapping[str, object]", source.values.get("trainer") or {})
    is_set = {key: source.origins.get(f"trainer.{key}") == COMMAND_LINE for key in ("num_steps", "num_epochs")}
    wins = is_set["num_steps"] and not is_set["num_epochs"] and trainer.get("num_epochs") is not None
    return ["trainer.num_epochs=null"] if wins else []


def in_python(text: str) -> str:
    """Return a message with the command's words replaced by those of Python.

    >>> in_python("resume it with `rally train runs/mine --resume`, or seed=1 (command line)")
    "resume it with `rally.train('runs/mine', resume=True)`, or seed=1 (rally.train)"
    """
    for ours, words in _WORDS:
        text = re.sub(ours, words, text)
    return text


def renamed(error: ErrorT) -> ErrorT:
    """Return an error whose message is that of `in_python`; the same error if its message does not change.

    Only errors whose single argument is their message can be made again with another one.
    """
    if isinstance(error, ConfigError):
        problems = tuple(map(in_python, error.problems))
        return error if problems == error.problems else type(error)(problems)
    said = str(error)
    return error if error.args != (said,) or in_python(said) == said else type(error)(in_python(said))
