"""Configs of verl's trainer for supervised fine-tuning, whose keys have no roles before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rallypoint.config.translate.table import Ends, Translation

_COLUMNS = {"messages_key": "messages", "prompt_key": "prompt", "response_key": "completion"}
_ON_TOO_LONG = {"error": "error", "right": "truncate"}
_ALWAYS = {
    "micro_batch_size_per_gpu": "micro-batches are cut by tokens, never by rows",
    "pad_mode": "rows are packed without padding, always",
    "enable_thinking_key": "the chat template has its own settings",
    "enable_thinking_default": "the chat template has its own settings",
    "tools_key": "tools are not read from a column",
    "ignore_input_ids_mismatch": "a template that writes a turn in two ways is an error",
    "train_max_samples": "all rows of the files are used",
    "val_max_samples": "all rows of the files are used",
}
"""Keys of `data` -> why there is none here."""


def is_sft(words: Sequence[str], given: Iterable[str]) -> bool:
    """Whether a command, or the keys of a file, are of that trainer.

    >>> is_sft(["-m", "verl.trainer.fsdp_sft_trainer"], []), is_sft([], ["data.max_length", "optim.lr"])
    (True, True)
    >>> is_sft(["-m", "verl.trainer.main_ppo"], ["algorithm.adv_estimator", "data.max_length"])
    False
    """
    if any("sft_trainer" in word for word in words):
        return True
    sections = {key.partition(".")[0] for key in given}
    return sections.isdisjoint({"algorithm", "actor_rollout_ref", "critic"}) and {"data", "optim"} <= sections


def set_sft(ends: Ends, found: Translation) -> None:
    """Set what the table of names cannot say."""
    if (path := ends.get("model.path", ends.get("model.partial_pretrain"))) is not None:
        found.keys["model.path"] = path
    found.keys["data.num_examples"] = ends.get("data.train_batch_size")
    for theirs, ours in _COLUMNS.items():
        if (name := ends.get(f"data.{theirs}")) not in (None, ours):
            found.keys[f"data.columns.{ours}"] = name
    cut = ends.get("data.truncation", "error")
    if cut in _ON_TOO_LONG:
        found.keys["data.on_too_long"] = _ON_TOO_LONG[cut]
    else:
        found.open[f"data.truncation={cut}"] = "rows can be cut at their end: data.on_too_long=truncate"
    tokens, parts = ends.get("data.max_token_len_per_gpu"), ends.peek("engine.ulysses_sequence_parallel_size", 1)
    if isinstance(tokens, int) and isinstance(parts, int):  # of the part of each row that a GPU has
        found.keys["engine.max_tokens_per_micro_batch"] = tokens * parts
    if (when := ends.peek("trainer.test_freq")) is not None and not isinstance(when, int):
        ends.get("trainer.test_freq")
        found.open[f"trainer.test_freq={when}"] = "validation.every_steps is a number of steps"
    for name, why in _ALWAYS.items():
        if ends.has(f"data.{name}"):
            found.open[f"data.{name}={ends.get(f'data.{name}')}"] = why
