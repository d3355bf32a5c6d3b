"""Their configs as dotted keys with values: command lines, scripts, YAML files, and calls in Python."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml

from rallypoint.config.translate.shell import ShellScript, read_script
from rallypoint.errors import ConfigError

Keys = dict[str, object]
"""Their dotted keys with values."""
PEFT = "LoraConfig"
"""What `use_peft` is of a script that has made an adapter's arguments itself."""
CALL = r"\s*(?:\w+\s*=\s*)?(?:\w+\.)*(\w+)\("
"""The beginning of a call in Python, and its name."""
_KEY = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(?!\()(.*)", re.DOTALL)
_DROPPED = re.compile(r"~[A-Za-z_]\w*\.[\w.]+(=.*)?")
"""What hydra takes out of a config."""
_WORD = re.compile(r"[^\s=-][^\s=]{0,250}")
"""What may be the name of a file."""
_YAML, _SHELL, _EXPECTED = (".yaml", ".yml"), (".sh", ".bash"), ".yaml, .yml, .sh or .bash"
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
"""A reference of OmegaConf, which verl's YAML files are written in: `${data.train_batch_size}`, `${oc.env:HOME}`."""
_LOST = object()
_NAME_IN_BRACES = re.compile(r"([{,]\s*[\w.]+):(?=[^\s/])")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def read_keys(text: str) -> tuple[Keys, ShellScript]:
    """Read `key=value` of a command line or of a script, or a YAML file by its name.

    Of a script only dotted keys count: the others are its variables. On a command line those are that it uses itself.
    A key that hydra is to take away has its `~` in front.

    Raises:
        ConfigError: it cannot be read, or has no key.
    """
    found, script, is_file = _read(text)
    for word in script.words:
        key = _KEY.fullmatch(word)
        if key is not None and ("." in key[1] or not (is_file or key[1] in script.used or key[1].isupper())):
            found.update(_leaves(value_of(key[2]), key[1]))
        elif _DROPPED.fullmatch(word):
            found[word.partition("=")[0]] = None
    return _checked(found, text), script


def read_arguments(text: str) -> tuple[Keys, ShellScript]:
    """Read the arguments of a call in Python, the flags of a command line or of a script, or a YAML file by its name.

    Raises:
        ConfigError: it cannot be read, or has no key.
    """
    if re.match(CALL, text):
        return _arguments(text), ShellScript({})
    found, script, _ = _read(text)
    flags = flags_of(script.words)
    if Path(file := str(flags.get("config"))).suffix in _YAML:  # `trl grpo --config grpo.yaml --beta 0.1`
        found, _, _ = _read(file)
        del flags["config"]
    return _checked({**found, **flags}, text), script


def value_of(text: str) -> object:
    """Return what a word means; what is not YAML is text.

    >>> [value_of(word) for word in ("1e-6", "True", "[a,b]", "[a", "{a:1,b: x}")]
    [1e-06, True, ['a', 'b'], '[a', {'a': 1, 'b': 'x'}]
    """
    if text.startswith("{"):  # hydra needs no space after a colon
        text = _NAME_IN_BRACES.sub(r"\1: ", text)
    try:
        return _with_numbers(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def _with_numbers(value: object) -> object:
    """Return a value of YAML in which 1e-6 is a number, which it is for them and not for YAML."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _read(text: str) -> tuple[Keys, ShellScript, bool]:
    """Return the keys of a YAML file or the words of anything else, and whether it is a script in a file."""
    path, is_word = Path(text.strip()), _WORD.fullmatch(text.strip()) is not None
    is_yaml = path.suffix in _YAML and (is_word or ("=" not in text and " -" not in text))  # it may have spaces
    is_script = path.suffix in _SHELL and is_word
    if (is_yaml or is_script or is_word) and path.is_dir():
        raise ConfigError((f"{path}: expected a {_EXPECTED} file, found a folder",))
    if is_word and not (is_yaml or is_script) and path.exists():
        raise ConfigError((f"{path}: expected a {_EXPECTED} file, found another one",))
    try:
        if is_yaml:
            return dict(_leaves(yaml.safe_load(path.read_text(encoding="utf-8")))), ShellScript({}), True
        if is_script:
            return {}, read_script(path.read_text(encoding="utf-8"), os.environ), True
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError((f"their config {path} cannot be read: {why}",)) from None
    return {}, read_script(text, os.environ), False


def _checked(found: Keys, text: str) -> Keys:
    if not found:
        raise ConfigError(
            (
                f"their config has no key=value: expected a command line, or the name of a {_EXPECTED} file with "
                f"keys in it, found {text.strip()[:60]!r}",
            )
        )
    return found


def flags_of(words: Sequence[str]) -> Keys:
    """Read `--key value`, `--key=value`, `--key` alone, which is true, and `key=value`.

    >>> flags_of("trl grpo --bf16 --beta -0.1 --report_to wandb mlflow --max-steps=5".split())
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
    """Read the arguments of a call in Python; what is not a literal stays as it is written."""
    try:
        node = ast.parse(text.strip()).body[0]
    except (SyntaxError, IndexError) as error:
        raise ConfigError((f"their config cannot be read as Python: {error}",)) from None
    call = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    if not isinstance(call, ast.Call):
        raise ConfigError((f"their config cannot be read as Python: expected one call, found {text.strip()[:60]!r}",))
    found: Keys = {}
    for keyword in call.keywords:
        name = keyword.arg or "**"
        try:
            found[name] = ast.literal_eval(keyword.value)
        except ValueError:
            found[name] = ast.unparse(keyword.value)
    return found


def _leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    inside: Mapping[str, object] = cast("Mapping[str, object]", tree) if isinstance(tree, Mapping) else {}
    for name, inner in inside.items():
        yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name))
    if prefix and not inside:
        yield prefix, _with_numbers(cast("object", tree))


def with_referred(keys: Mapping[str, object], usual: Mapping[str, object], environment: Mapping[str, str]) -> Keys:
    """Put in what keys refer to.

    Args:
        keys: theirs, dotted.
        usual: what keys are that are not given.
        environment: variables for `oc.env`.

    >>> keys = {"data.size": 64, "actor.size": "${data.size}", "actor.n": "${.size}", "a": "${oc.select:b,2}/${c.d}"}
    >>> with_referred(keys, {}, {})
    {'data.size': 64, 'actor.size': 64, 'actor.n': 64, 'a': '2/${c.d}'}
    """
    found: Keys = dict(keys)
    for _ in range(20):  # a reference may lead to another one; one that leads to itself stays
        before, found = (
            found,
            {key: _filled(value, key, {**usual, **found}, environment) for key, value in found.items()},
        )
        if found == before:
            break
    return found


def _filled(value: object, key: str, known: Mapping[str, object], environment: Mapping[str, str]) -> object:
    if isinstance(value, list):
        return [_filled(one, key, known, environment) for one in cast("list[object]", value)]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        referred = _referred(whole[1], key, known, environment)
        return value if referred is _LOST else referred

    def written(found: re.Match[str]) -> str:
        referred = _referred(found[1], key, known, environment)
        return found[0] if referred is _LOST else str(referred)

    return _REFERENCE.sub(written, value)


def _referred(name: str, key: str, known: Mapping[str, object], environment: Mapping[str, str]) -> object:
    """Return what stands in `${...}`: a name from the root, or with dots in front from the section of the key."""
    resolver, colon, inner = name.partition(":")
    if not colon:
        return known.get(_from_root(name, key), _LOST)
    wanted, has_usual, usual = (part.strip() for part in inner.partition(","))
    if resolver not in {"oc.env", "oc.select"}:
        return _LOST
    where = environment if resolver == "oc.env" else known
    found = where.get(wanted, usual if has_usual else _LOST)
    return value_of(found) if isinstance(found, str) else found


def _from_root(name: str, key: str) -> str:
    """Return a name without dots in front: one is the key's section, each further one the section around.

    >>> _from_root(".n", "a.b.c"), _from_root("..n", "a.b.c"), _from_root("n", "a.b.c")
    ('a.b.n', 'a.n', 'n')
    """
    dots = len(name) - len(name.lstrip("."))
    return ".".join([*key.split(".")[:-dots], name[dots:]]) if dots else name
