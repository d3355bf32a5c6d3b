"""What a run is made of before any role exists: what was found, and the model and the data that it makes for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from rallypoint.config import RunConfig
from rallypoint.data import EncodedPrompts
from rallypoint.model_files.locate import quiet_transformers
from rallypoint.recipes.made import made_data, made_model
from rallypoint.recipes.reading import Found, repetitions
from rallypoint.run.folder import RunFolder


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """All that is read from disk on the driver."""

    model_path: str
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]
    train: EncodedPrompts
    validation: EncodedPrompts | None

    def token_text(self, token: int) -> str:
        """Return what a token looks like; a special one by its name."""
        return str(self.tokenizer.decode([token]))

    def counts(self) -> dict[str, float]:
        """Return how many prompts there are, and how many of them were too long."""
        sets = [encoded for encoded in (self.train, self.validation) if encoded is not None]
        return {
            "data/num_prompts": len(self.train.examples),
            "data/num_distinct": self.train.num_distinct,
            "data/num_dropped": sum(len(encoded.dropped) for encoded in sets),
            "data/num_truncated": sum(len(encoded.truncated) for encoded in sets),
        }


def prepare(config: RunConfig, folder: RunFolder, found: Found, say: Callable[[str], None]) -> Material:
    """Make the model and the data that a config wants made, beside what was found.

    Args:
        config: of the run.
        folder: receives what is made.
        found: what the run begins with.
        say: called with one line about prompts that were left out, cut, or are there more than once.

    Raises:
        CheckpointError: model or data that the run made for itself were damaged since.
        DataError: prompts that are made are too long.
        DiskError: the disk is full or not writable.
    """
    quiet_transformers()
    train, validation, notes = found.train, found.validation, list(found.notes)
    if config.data.generate is not None:
        train, validation = (found.encode(config, [path], notes.append) for path in made_data(config, folder))
        notes += repetitions(config, train, validation)
    assert train is not None, "the config was checked: data.train or data.generate"
    for line in notes:
        say(line)
    model_path = config.model.path or str(made_model(config, folder))
    return Material(model_path, found.tokenizer, found.stop_tokens, train, validation)
