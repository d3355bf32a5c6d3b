"""The model card of an exported model: what it was made from, by what, and how good it was.

Owns: what a stranger has to know of a model. Must not know: where it goes. Files are named without their folders: a
card is read by others, and where they were on a machine is nobody's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rallypoint import checkpoint
from rallypoint.config import RunConfig, values_of
from rallypoint.journal import RunState
from rallypoint.prepare.model_folders import is_hub_name
from rallypoint.recipes.use import Trained
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import Record, has_record

CARD = "README.md"


def model_card(trained: Trained) -> str | None:
    """Return the card of a checkpoint of a run; None of any other model, of which nothing is known.

    Raises:
        CheckpointError: its record cannot be read.
    """
    folder = Path(trained.path)
    if trained.config is None or not has_record(folder):
        return None
    step = json.loads((folder / checkpoint.MANIFEST).read_text(encoding="utf-8"))["step"]
    run = RunFolder(folder.parents[1])
    state = run.state() if run.journal.is_file() else RunState()
    record = Record.read(folder)
    lines = [*_front(trained.config), f"# {run.path.name}, step {step}", ""]
    lines += [f"Trained with [rallypoint](https://pypi.org/project/rallypoint/), recipe `{trained.config.recipe}`.", ""]
    lines += _table(dict(_facts(trained, record, state, step, checkpoint.weights_digest(folder))))
    lines += ["", "## Made from", "", *_table(dict(_files(record))), ""]
    lines += ["## Config", "", "<details><summary>every key</summary>", "", *_table(_keys(trained.config)), ""]
    return "\n".join([*lines, "</details>", ""])


def _front(config: RunConfig) -> list[str]:
    """Return what the hub reads."""
    about: dict[str, Any] = {"library_name": "transformers" if config.model.lora is None else "peft"}
    if config.model.path is not None and is_hub_name(config.model.path):
        about["base_model"] = config.model.path
    about |= {"pipeline_tag": "text-generation", "tags": ["rallypoint", "reinforcement-learning", config.recipe]}
    return ["---", yaml.safe_dump(about, sort_keys=False).rstrip(), "---", ""]


def _facts(trained: Trained, record: Record, state: RunState, step: int, weights: str) -> Iterator[tuple[str, str]]:
    config = trained.config
    assert config is not None, "a card is of a run"
    yield "step", f"{step} of {config.trainer.num_steps}"
    yield "seed", str(config.seed)
    yield "base model", _name(config.model.path or "made by the run, with random weights")
    rewards = config.reward.named_functions.values()
    if rewards:
        yield "reward", ", ".join(map(_name, rewards))
    measured = state.validations.get(step)
    if measured is not None:
        scores = {name.partition("validation/")[2]: value for name, value in measured.metrics.items()}
        yield "validation", ", ".join(f"{name} {value:.4g}" for name, value in scores.items() if name)
    tokens = [done.metrics.get("actor/num_tokens", 0) for at, done in state.steps.items() if at <= step]
    if tokens:
        yield "tokens trained", f"{int(sum(tokens)):,}"
    yield "weights", f"`{weights}` (xxh3 of the files' digests in manifest.json)"
    yield "packages", ", ".join(f"{name} {version}" for name, version in record.software.items())
    if state.began is not None:
        yield "machine", state.began.machine


def _files(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the digest of each file that decided the weights."""
    for key, files in record.inputs.items():
        for name, digest in files.items():
            yield f"{key}, {name}", f"`{digest}`"


def _keys(config: RunConfig) -> dict[str, str]:
    return {f"`{key}`": f"`{_shown(value)}`" for key, value in values_of(config)}


def _shown(value: object) -> str:
    match value:
        case str():
            return _name(value)
        case list() | tuple():
            return json.dumps([_shown(each) for each in value])  # pyright: ignore[reportUnknownVariableType]
        case Mapping():
            return json.dumps({str(key): _shown(each) for key, each in value.items()})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return json.dumps(value, default=str)


def _name(text: str) -> str:
    """Return a path of this machine without its folders; anything else as it is.

    >>> _name("/data/me/rewards.py:score"), _name("Qwen/Qwen3-0.6B"), _name("~/data.parquet")
    ('rewards.py:score', 'Qwen/Qwen3-0.6B', 'data.parquet')
    """
    return Path(text).name if text.startswith(("/", "~")) else text


def _table(rows: Mapping[str, str]) -> list[str]:
    cells = [f"| {name} | {value} |" for name, value in ((_cell(a), _cell(b)) for a, b in rows.items())]
    return ["| | |", "|---|---|", *cells]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
