"""Folders of models and adapters, looked at before a run: what they lack, and the rows that they are made for.

Nothing here imports torch or transformers: `model_limits.py` reads what only they can say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rallypoint import checkpoint as checkpoints
from rallypoint.config import Problem, RunConfig
from rallypoint.config.shape import SIZES, read_shape
from rallypoint.config.tree import row_limit
from rallypoint.data.files import is_url
from rallypoint.data.remote import check_url


def is_hub_name(path: str) -> bool:
    """Whether a model's path can only name a repository on the Hugging Face hub.

    >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("./model"), is_hub_name("a/b/c")
    (True, False, False)
    """
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).parent.exists()


def model_problems(name: str, path: str) -> Iterator[Problem]:
    """Yield why the folder that a key names is not a model of Hugging Face; nothing of what the hub or a URL has."""
    folder = Path(path).expanduser()
    if is_hub_name(path) or is_url(path):
        if is_url(path) and (problem := check_url(path)) is not None:
            yield Problem.of(f"^{name}={path!r}: {problem}", is_local=True)
        return
    if not folder.is_dir():
        what = " is a file, expected a folder" if folder.exists() else f": no such folder (looked in {Path.cwd()})"
        yield Problem.of(
            f"^{name}={path!r}{what}; a Hugging Face folder has config.json and *.safetensors",
            is_local=not folder.exists(),
        )
        return
    config = folder / "config.json"
    if (folder / "adapter_config.json").is_file() and not config.is_file():
        yield Problem.of(
            f"^{name}={path!r} is an adapter, not a model: train it further with model.lora.path, on the model that it "
            "was made for, or merge it into that model with `rally export`"
        )
        return
    if not config.is_file():
        yield Problem.of(f"^{name}={path!r}: {_no_model(path)}")
        return
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield Problem.of(f"^{name}={path!r}: config.json is not valid JSON ({error})")
        return
    if not isinstance(content, dict) or "model_type" not in content:
        yield Problem.of(f"^{name}={path!r}: config.json has no model_type, so transformers cannot load it")
        return
    if wrong := [f"{size}={content[size]!r}" for size in SIZES if size in content and not _is_size(content[size])]:
        yield Problem.of(f"^{name}={path!r}: config.json has {', '.join(wrong)}; expected whole numbers of at least 1")
    if not any(folder.glob("*.safetensors")):
        yield Problem.of(
            f"^{name}={path!r}: no *.safetensors in it (pickled .bin weights are not loaded)",
            is_local=True,
        )


def _no_model(path: str) -> str:
    """Describe a folder without config.json: a run, whose newest checkpoint is meant, or nothing that is known."""
    folder = Path(path).expanduser()
    if not (folder / "config.yaml").is_file():
        return "not a Hugging Face folder, config.json is missing in it"
    found = checkpoints.visible(folder / "checkpoints")
    if not found:
        return "the folder of a run, which has no checkpoint yet; expected a Hugging Face folder"
    newest = Path("checkpoints") / checkpoints.checkpoint_name(found[-1])
    if (folder / newest / "adapter_config.json").is_file():
        return (
            f"the folder of a run that trained adapters; merge them first, `rally export {path} merged`, or train them "
            f"further with model.lora.path={path.rstrip('/')}/{newest} on the model that they were made for"
        )
    return f"the folder of a run; its newest model is {path.rstrip('/')}/{newest}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def adapter_problems(name: str, path: str, model: str | None) -> Iterator[Problem]:
    """Yield what the folder that a key names lacks of an adapter in PEFT's format, for a model of some type."""
    folder = Path(path).expanduser()
    missing = [file for file in ("adapter_config.json", "adapter_model.safetensors") if not (folder / file).is_file()]
    if not folder.is_dir():
        yield Problem.of(
            f"^{name}={path!r}: no such folder (looked in {Path.cwd()}); expected one that PEFT saved",
            is_local=not folder.exists(),
        )
    elif missing:
        yield Problem.of(f"^{name}={path!r}: not an adapter in PEFT's format, it lacks {' and '.join(missing)}")
    elif model is not None and (base := _base_of(folder)) is not None:
        ours, theirs = read_shape(model), read_shape(base)
        if ours is not None and theirs is not None and ours.model_type != theirs.model_type:
            yield Problem.of(
                f"^{name}={path!r} was made for {base!r}, of type {theirs.model_type!r}, but ^model.path={model!r} is "
                f"of type {ours.model_type!r}; expected an adapter of that model"
            )


def adapter_notes(config: RunConfig) -> Iterator[str]:
    """Yield a note on an adapter that was made for another model, which may have weights of the same sizes."""
    lora, model = config.model.lora, config.model.path
    base = _base_of(Path(lora.path).expanduser()) if lora is not None and lora.path is not None else None
    if base is None or model is None:
        return
    both = [Path(one).expanduser() for one in (base, model)]
    are_known = all(map(is_hub_name, (base, model))) or all(one.is_dir() for one in both)
    if are_known and both[0].resolve() != both[1].resolve():
        yield f"the adapter of model.lora.path was made for {base}, and model.path is {model}"


def _base_of(folder: Path) -> str | None:
    """Return the model that an adapter says it was made for; None if it does not say."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return base if isinstance(base, str) else None


def position_problems(name: str, path: str, config: RunConfig) -> Iterator[Problem]:
    """Compare the rows with the length that a local model supports; what comes from the hub is looked at later."""
    file = Path(path).expanduser() / "config.json"
    try:
        if not file.is_file():
            return
        longest = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    # Prompts that may be dropped or cut are measured against what the model supports, one by one.
    least = 2 if config.trains_on_files else config.rollout.max_response_tokens + 1
    needed = config.max_row_tokens if config.data.on_too_long == "error" else least
    if isinstance(longest, int) and longest < needed:
        keys, made_of = row_limit(config)
        yield Problem(
            (*keys, name),
            f"{made_of} make{'s' * (len(keys) == 1)} rows of up to {config.max_row_tokens} tokens; expected at most "
            f"{longest}, which is what {name}={path!r} supports, or data.on_too_long=drop or truncate",
        )
