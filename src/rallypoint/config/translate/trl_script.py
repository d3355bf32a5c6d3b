"""What a script in Python gives a trainer of TRL's: its arguments, adapter, model, data and rewards, as keys.

Must not know: what the arguments of the classes mean here. What cannot be translated is named, with its reason; nothing
is left out without a word.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from rallypoint.config.other_projects import other_projects
from rallypoint.config.translate.program import Made, Program, read_program, unknown_in
from rallypoint.config.translate.reading import PEFT, Keys
from rallypoint.errors import ConfigError

LOST = "cannot be translated: it is known only when the script runs"
_REWARDS = (
    "cannot be translated, since a run does not import the script: put the functions into a file of their own and give "
    "them to rally.train(reward=[...]), which calls them as TRL does, or write them as docs/reward.md says and name "
    "them in reward.function or reward.functions"
)
_FILES = ("json", "csv", "parquet", "text", "arrow")
"""What `load_dataset` calls formats of files."""
_IDLE = ("processing_class", "tokenizer", "model", "args", "peft_config", "train_dataset", "eval_dataset")
_SAYS_NOTHING = {"task_type": None, "bias": "none", "inference_mode": False, "use_cache": None, "device_map": None}
"""Arguments of adapters and models that need no key, with the only value that does not; None: with any."""


@dataclasses.dataclass(slots=True)
class Script:
    """What a script says of a run."""

    kind: str
    """Class of the arguments."""
    keys: Keys
    """Theirs."""
    ours: Keys = dataclasses.field(default_factory=dict[str, object])
    """Those of ours that no key of theirs stands for."""
    lost: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """What cannot be translated, as written, and why."""


def script_in(words: list[str]) -> Path | None:
    """Return the Python file that a command runs, or that is given alone; None if there is no such file.

    Raises:
        ConfigError: a file that is given alone is not there.
    """
    files = [Path(word) for word in words if word.endswith(".py")]
    if len(words) == len(files) == 1 and not files[0].is_file():
        raise ConfigError((f"{files[0]}: there is no such file",))
    return next((file for file in files if file.is_file()), None)


def read_trl_script(path: Path, flags: Mapping[str, object], classes: Mapping[str, str]) -> Script:
    """Read what a script gives the first trainer that it makes.

    Args:
        path: of the script.
        flags: of its command line.
        classes: of TRL's arguments.

    Raises:
        ConfigError: it cannot be read, or makes no trainer and no arguments of TRL's.
    """
    try:
        program = read_program(path.read_text(encoding="utf-8"), flags)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError((f"their script {path} cannot be read: {error}",)) from None
    trainer = program.trainers[0] if program.trainers else Made("", {}, 0)
    args = trainer.given.get("args")
    if args is None and not program.trainers:
        args = next((one for one in program.configs if one.name in classes), None)
    kind = args.name if isinstance(args, Made) and args.name in classes else trainer.name.replace("Trainer", "Config")
    if not kind:
        raise ConfigError((f"{path}: expected a trainer of TRL's, such as GRPOTrainer(...), or a {'/'.join(classes)}",))
    script = Script(kind, {})
    for other in program.trainers[1:]:
        script.lost[f"{other.name} (line {other.line})"] = (
            f"cannot be translated: one run is one trainer, and the first one is taken, that of line {trainer.line}"
        )
    if trainer.name and trainer.name.replace("Trainer", "Config") != kind:
        script.lost[trainer.name] = f"cannot be translated: a class of the script's own; read as the trainer of {kind}"
    _take_arguments(script, args)
    _take_model(script, trainer.given.get("model"))
    _take_adapter(script, trainer.given.get("peft_config"))
    _take_rewards(script, trainer.given.get("reward_funcs"), program)
    for name, key in (("train_dataset", "data.train"), ("eval_dataset", "data.validation")):
        _take_data(script, name, key, trainer.given.get(name))
    _take_others(script, trainer)
    return script


def _take_arguments(script: Script, args: object) -> None:
    if isinstance(args, Made):
        given = dict(args.given)
        if isinstance(inside := given.get("model_init_kwargs"), dict):
            del given["model_init_kwargs"]
            given |= cast("dict[str, object]", inside)
        for name, value in given.items():
            if not _is_idle(name, value):
                _take(script, name, value, "")
    elif args is not None:
        script.lost[f"args={_written(args)}"] = LOST


def _take(script: Script, name: str, value: object, section: str) -> None:
    """Take an argument, unless only the program knows it."""
    if any(unknown_in(value)):
        script.lost[f"{section}{name}={_written(value)}"] = LOST
    else:
        script.keys[other_projects().trl.renamed.get(name, name)] = (
            list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
        )


def _take_model(script: Script, model: object) -> None:
    found = _pretrained(model)
    if found is not None:
        _take(script, "model_name_or_path", found.given.get("path"), "model: ")
        for name, value in found.given.items():
            if name != "path" and not _is_idle(name, value):
                _take(script, name, value, "model: ")
    elif model is not None:
        script.lost[f"model={_written(model)}"] = LOST


def _pretrained(model: object) -> Made | None:
    if isinstance(model, str):
        return Made("from_pretrained", {"path": model}, 0)
    return model if isinstance(model, Made) and model.name == "from_pretrained" else None


def _take_adapter(script: Script, adapter: object) -> None:
    if isinstance(adapter, Made) and adapter.name == PEFT:
        script.keys["use_peft"] = PEFT
        for name, value in adapter.given.items():
            if not _is_idle(name, value):
                if name in {"r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters"}:
                    _take(script, name, value, f"{PEFT}: ")
                else:
                    script.lost[f"{PEFT}({name}={_written(value)})"] = "cannot be translated: adapters have no such key"
    elif adapter is not None:
        script.lost[f"peft_config={_written(adapter)}"] = LOST


def _is_idle(name: str, value: object) -> bool:
    return name in _SAYS_NOTHING and _SAYS_NOTHING[name] in (None, value)


def _take_rewards(script: Script, rewards: object, program: Program) -> None:
    """Names and folders of reward models are known; functions are the script's."""
    several = cast("list[object]", rewards) if isinstance(rewards, list) else [] if rewards is None else [rewards]
    models = [one for one in several if isinstance(one, str)]
    if models and len(models) == len(several):
        named = [{"name": f"model{place + 1}", "path": one} for place, one in enumerate(models)]
        script.ours |= {"reward.path": models[0]} if len(models) == 1 else {"reward.models": named}
    elif several:
        own = ", ".join(_written(one) for one in several)
        here = program.functions & {_written(one) for one in several}
        where = f" (of the script: {', '.join(sorted(here))})" if here else ""
        script.lost[f"reward_funcs=[{own}]{where}"] = _REWARDS


def _take_data(script: Script, name: str, key: str, data: object) -> None:
    if data is None:
        return
    if not isinstance(data, Made) or data.name != "load_dataset" or any(unknown_in(data.given)):
        script.lost[f"{name}={_written(data)}"] = LOST
        return
    given = dict(data.given)
    path, files, split = given.pop("path", None), given.pop("data_files", None), given.pop("split", None)
    subset = given.pop("name", None)
    if path in _FILES and files is not None:
        path = files
    paths = cast("list[object]", path) if isinstance(path, list) else [path]
    more = {"subset": subset, "split": None if split == "train" else split}
    if not all(isinstance(one, str) for one in paths) or (split is not None and not re.fullmatch(r"\w+", str(split))):
        script.lost[f"{name}={_written(data)}"] = (
            "cannot be translated: expected files or a name, and the name of a split"
        )
        return
    is_plain = not any(more.values())
    named = {what: value for what, value in more.items() if value}
    script.ours[key] = [one if is_plain else {"path": one, **named} for one in paths]
    for what, value in given.items():
        script.lost[f"{name}: load_dataset({what}={_written(value)})"] = "cannot be translated: data have no such key"
    for what in data.changed:
        script.lost[f"{name}: {what}(...)"] = (
            "cannot be translated, since it is a program: rows are read as they are; name their columns in "
            "data.columns, or write the changed rows to a file"
        )


def _take_others(script: Script, trainer: Made) -> None:
    """Name what else the trainer is given; a tokenizer or a reference of the model itself needs nothing."""
    model = _path_of(trainer.given.get("model"))
    for name, value in trainer.given.items():
        is_own = model is not None and _path_of(value) == model
        if value is None or (is_own and name in {"processing_class", "tokenizer", "ref_model"}):
            continue
        if name in {"processing_class", "tokenizer"}:
            script.lost[f"{name}={_written(value)}"] = "cannot be translated: the tokenizer is that of model.path"
        elif name == "ref_model":
            script.lost[f"{name}={_written(value)}"] = (
                "cannot be translated: the reference is the model that the run begins with"
            )
        elif name in {"teacher_model", "reward_model"} and (path := _path_of(value)) is not None:
            script.ours["teacher.path" if name == "teacher_model" else "reward.path"] = path
        elif name not in {*_IDLE, "reward_funcs"}:
            script.lost[f"{trainer.name}({name}={_written(value)})"] = "cannot be translated: no key stands for it"


def _path_of(value: object) -> str | None:
    found = _pretrained(value)
    path = None if found is None else found.given.get("path")
    return path if isinstance(path, str) else None


def _written(value: object) -> str:
    """Return a value as it is written, or what it consists of."""
    return _shortened(", ".join(_texts(value)) or "nothing")


def _texts(value: object) -> Iterator[str]:
    lost = list(unknown_in(value))
    if isinstance(value, Made):
        inner = ", ".join(f"{name}={_written(one)}" for name, one in value.given.items())
        yield f"{value.name}({inner})"
    else:
        yield from lost or [repr(value)]


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]} ..."
