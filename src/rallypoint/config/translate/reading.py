"""Their configs as dotted keys with values: command lines, scripts, YAML files, and calls in Python."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml

from rallypoint.config.translate.shell import Script, read_script
from rallypoint.errors import ConfigError

Keys = dict[str, object]
"""Their dotted keys with values."""

CALL = r"\s*(?:\w+\s*=\s*)?(?:\w+\.)*(\w+)\("
"""The beginning of a call in Python, and its name."""
_KEY = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(?!\()(.*)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def read_keys(text: str) -> tuple[Keys, Script]:
    """Read `key=value` of a command line or of a script, or a YAML file by its name.

    Of a script only dotted keys count: the others are its variables. On a command line those are that it uses itself.

    Raises:
        ConfigError: it cannot be read, or has no key.
    """
    tree, script, is_file = _read(text)
    found: Keys = dict(_leaves(tree))
    for word in script.words:
        key = _KEY.fullmatch(word)
        if key is not None and ("." in key[1] or not (is_file or key[1] in script.used or key[1].isupper())):
            found[key[1]] = value_of(key[2])
    return _checked(found), script


def read_arguments(text: str) -> tuple[Keys, Script]:
    """Read the arguments of a call in Python, the flags of a command line or of a script, or a YAML file by its name.

    Raises:
        ConfigError: it cannot be read, or has no key.
    """
    if re.match(CALL, text):
        return _arguments(text), Script({})
    tree, script, _ = _read(text)
    return _checked({**dict(_leaves(tree)), **_flags(script.words)}), script


def value_of(text: str) -> object:
    """Return what a word means; what is no YAML is text.

    >>> [value_of(word) for word in ("1e-6", "True", "[a,b]", "[a")]
    [1e-06, True, ['a', 'b'], '[a']
    """
    if _NUMBER.fullmatch(text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _read(text: str) -> tuple[object, Script, bool]:
    """Return the tree of a YAML file or the words of anything else, and whether it is a script in a file."""
    path = Path(text.strip())
    try:
        if path.suffix in {".yaml", ".yml"}:
            return yaml.safe_load(path.read_text(encoding="utf-8")), Script({}), True
        if path.suffix in {".sh", ".bash"} and len(text.split()) == 1:
            return {}, read_script(path.read_text(encoding="utf-8"), os.environ), True
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError((f"their config cannot be read: {error}",)) from None
    return {}, read_script(text, os.environ), False


def _checked(found: Keys) -> Keys:
    if not found:
        raise ConfigError(("their config has no key=value",))
    return found


def _flags(words: Sequence[str]) -> Keys:
    """Read `--key value`, `--key=value`, `--key` alone, which is true, and `key=value`.

    >>> _flags("trl grpo --bf16 --beta -0.1 --report_to wandb mlflow --max-steps=5".split())
    {'bf16': True, 'beta': -0.1, 'report_to': ['wandb', 'mlflow'], 'max_steps': 5}
    """
    before = ["", *words]
    starts = [
        place
        for place, word in enumerate(words)  # before it are the flags of a launcher
        if word.endswith(".py") or (word == "trl" and not before[place].startswith("--"))
    ]
    flags: dict[str, list[str]] = {}
    own: list[str] | None = None
    for word in words[starts[0] + 1 if starts else 0 :]:
        name, equals, text = word.removeprefix("--").partition("=")
        is_flag = word.startswith("--")
        if is_flag and re.fullmatch(r"[A-Za-z_][\w.-]*", name):
            own = flags.setdefault(name.replace("-", "_"), [])
            own[:] = [text] if equals else []
            own = None if equals else own
        elif equals and re.fullmatch(r"[A-Za-z_][\w.]*", name):
            flags[name], own = [text], None
        elif own is not None:
            own.append(word)
    single = {name: value_of(texts[0]) if texts else True for name, texts in flags.items() if len(texts) < 2}
    return {name: single[name] if name in single else [value_of(text) for text in flags[name]] for name in flags}


def _arguments(text: str) -> Keys:
    """Read the arguments of a call in Python; what is no literal stays as it is written."""
    try:
        node = ast.parse(text.strip()).body[0]
    except (SyntaxError, IndexError) as error:
        raise ConfigError((f"their config cannot be read as Python: {error}",)) from None
    call = cast("ast.Assign | ast.Expr", node).value
    found: Keys = {}
    for keyword in cast("ast.Call", call).keywords:
        if keyword.arg is not None:
            written = ast.unparse(keyword.value)
            try:
                found[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError:
                found[keyword.arg] = written
    return found


def _leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(tree, Mapping):
        for name, inner in cast("Mapping[str, object]", tree).items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix, tree
