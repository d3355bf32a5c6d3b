"""What the models of a run say of its rows: their lengths, the ids that they know, the tokens that end a response.

Owns: what is compared between config, tokenizer and models before a role exists. Must not know: run folders, prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from rallypoint.config import RECIPES, RunConfig
from rallypoint.config.tree import row_limit
from rallypoint.data import TemplateProbe, load_tokenizer, make_digits_tokenizer
from rallypoint.data.remote import here
from rallypoint.errors import ModelError
from rallypoint.model_files import fresh, load_critic, load_new_reward_model, load_policy, load_reward_model
from rallypoint.model_files.locate import read_config


def read_models(config: RunConfig) -> tuple[PreTrainedTokenizerBase, tuple[int, ...], tuple[RowLimits, ...]]:
    """Return the policy's tokenizer, the ids that end a response, and what every model says of rows."""
    path, trust = config.model.path, config.model.trust_remote_code
    if path is None:
        tokenizer = make_digits_tokenizer()
        limits = RowLimits(len(tokenizer), config.max_row_tokens)
        stops = (cast("int", tokenizer.eos_token_id),)
        path = "model.create"
    else:
        model = read_config(path, trust)  # before the tokenizer, which would be blamed for what is wrong in it
        tokenizer = load_tokenizer(
            path, trust_remote_code=trust, changes=config.model.tokenizer, template=config.data.template
        )
        limits = RowLimits.of(model)
        probe = TemplateProbe.of(tokenizer)
        check_ids(path, probe.ids, tokenizer, limits.num_ids)
        if probe.uncued and "rollout" in config.roles:
            raise ModelError(
                f"{path}: the chat template writes {probe.uncued!r} before each answer, and nothing where one is asked "
                "for: write it there too if add_generation_prompt is true, and give it as model.tokenizer.chat_template"
            )
        stops = stop_tokens(path, tokenizer, limits.num_ids)
    own, policy = config.own_models, limits
    readers = [(folder, RowLimits.of(read_config(folder, trust), "the critic")) for folder in own.get("critic", ())]
    readers += [
        (folder, check_reader(folder, path, tokenizer, whose="the teacher", trust_remote_code=trust))
        for folder in config.teachers.folders
    ]
    readers += [
        (folder, check_reward_model(folder, path, tokenizer, trust_remote_code=trust))
        for folder in own.get("reward", ())
    ]
    num_ids = len(tokenizer) if policy.num_ids is None else min(len(tokenizer), policy.num_ids)
    for folder, limits in readers:
        check_ids(folder, range(num_ids), tokenizer, limits.num_ids)
    return tokenizer, stops, (policy, *(limits for _, limits in readers))


def check_weights(config: RunConfig) -> None:
    """Compare the weights of the folders that a run begins with with their config.json, by the headers of the files.

    Models that are made, or come from the hub, are checked when the run loads them.

    Raises:
        ModelError: a run would refuse them too.
    """
    own, lora = config.own_models, config.model.lora
    critic = next(iter(own.get("critic", (config.model.path,)))) if "critic" in config.roles else None
    load_actor = load_new_reward_model if RECIPES[config.recipe].trains == "scores" else load_policy
    folders = [(config.model.path, load_actor, lora), (critic, load_critic, lora and fresh(lora))]
    folders += [(path, load_reward_model, None) for path in own.get("reward", ())]
    folders += [(path, load_policy, None) for path in own.get("teacher", ())]
    for path, load, adapters in folders:
        if path is not None and Path(path := here(path)).expanduser().is_dir():
            load.check(path, trust_remote_code=config.model.trust_remote_code, lora=adapters)


def stop_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase, num_ids: int | None) -> tuple[int, ...]:
    """Return the ids that end a response: those that the folder names, and what the chat template ends a turn with.

    Ids that a model of `num_ids` cannot sample are left out: its vocabulary may be smaller.

    Raises:
        ModelError: none is left.
    """
    named, end = _named_ends(model_path, tokenizer), TemplateProbe.of(tokenizer).end
    known = range(num_ids) if num_ids is not None else range(2**31)
    found = {token for token in (*named, *(() if end is None else (end,))) if token in known}
    if not found:
        raise ModelError(
            f"{model_path}: no response could end: the ids that end one are {named}, and the model knows 0 to "
            f"{len(known) - 1}; use the tokenizer that the model was trained with"
        )
    return tuple(sorted(found))


def _named_ends(model_path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a response: the tokenizer's, and those of generation_config.json if there is one."""
    model_path = here(model_path)
    try:
        more = GenerationConfig.from_pretrained(model_path, local_files_only=Path(model_path).is_dir()).eos_token_id
    except OSError:
        more = None
    ids: list[object] = [tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]
    return [token for token in ids if isinstance(token, int)]


def template_notes(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield notes on what the chat template writes around messages."""
    probe = TemplateProbe.of(tokenizer)
    named = [] if config.model.path is None else _named_ends(config.model.path, tokenizer)
    if named and probe.end is not None and probe.end not in named:
        yield (
            f"the chat template ends a turn with {tokenizer.convert_ids_to_tokens(probe.end)!r}, which "
            f"{config.model.path} does not name as an end: it ends a response in this run, and in the models that it "
            "saves"
        )
    if probe.opened is not None and config.reward.all_functions:
        yield (
            f"the chat template's cue opens {probe.opened}: responses begin after it, so that no reward function "
            f"finds {probe.opened} in one"
        )


def id_notes(limits: Sequence[RowLimits]) -> Iterator[str]:
    """Yield notes on models that lack ids which the policy, the first, may sample, and no text has."""
    for one in limits[1:]:
        if one.num_ids is not None and limits[0].num_ids is not None and one.num_ids < limits[0].num_ids:
            yield (
                f"the policy has {limits[0].num_ids:,} ids, and {one.whose} {one.num_ids:,}: the tokenizer has none of "
                "the others, but the policy may sample one, which stops the run"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class RowLimits:
    """Limits that a model's config.json sets to its rows; None where it sets none."""

    num_ids: int | None
    """Number of rows of the embedding."""
    max_positions: int | None
    whose: str = "the model"

    @classmethod
    def of(cls, model: PreTrainedConfig, whose: str = "the model") -> RowLimits:
        """Read them from a config that transformers has loaded."""
        return cls(getattr(model, "vocab_size", None), getattr(model, "max_position_embeddings", None), whose)

    def max_data_tokens(self, config: RunConfig) -> int:
        """Return the longest prompt (or row, if the data are rows): as configured, or shorter if longer ones go.

        Raises:
            ModelError: the model does not support rows of the length that the config asks for.
        """
        most = 0 if config.trains_on_files else config.rollout.max_response_tokens
        wanted = config.max_row_tokens - most
        if self.max_positions is None or config.max_row_tokens <= self.max_positions:
            return wanted
        if config.data.on_too_long == "error" or most >= self.max_positions:
            keys, _ = row_limit(config)
            raise ModelError(
                f"{self.whose} supports rows of {self.max_positions} tokens, but {' + '.join(keys)} = "
                f"{config.max_row_tokens}; lower {'it' if len(keys) == 1 else 'one of them'}"
            )
        return self.max_positions - most


def check_ids(path: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, num_ids: int | None) -> None:
    """Refuse a model that lacks ids that it will read; those of the data are looked at when they are encoded.

    A tokenizer may have more ids than a model: many have some that nobody uses.

    Args:
        path: of the model.
        ids: to be read.
        tokenizer: of the policy.
        num_ids: that the model knows; None if it does not say.

    Raises:
        ModelError: there are such ids.
    """
    if num_ids is not None and (largest := max(ids, default=0)) >= num_ids:
        raise ModelError(
            f"{path}: the tokenizer has {len(tokenizer)} ids, but the embedding only {num_ids} rows, and the model "
            f"reads {tokenizer.convert_ids_to_tokens(largest)!r} ({largest}); use the tokenizer that it was trained "
            "with"
        )


def check_reward_model(
    path: str, model_path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> RowLimits:
    """Refuse a reward model whose tokenizer differs from the policy's, as it reads the policy's ids; return its limits.

    Args:
        path: of the reward model.
        model_path: of the policy.
        tokenizer: of the policy.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ModelError: it is not a reward model, or another tokenizer was used for it.
    """
    load_reward_model.check_config(path, read_config(path, trust_remote_code))
    return check_reader(path, model_path, tokenizer, whose="the reward model", trust_remote_code=trust_remote_code)


def check_reader(
    path: str, model_path: str, tokenizer: PreTrainedTokenizerBase, *, whose: str, trust_remote_code: bool
) -> RowLimits:
    """Refuse a model that reads the policy's ids with another tokenizer; return its limits.

    Args:
        path: of the model.
        model_path: of the policy.
        tokenizer: of the policy.
        whose: the model in words.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ModelError: another tokenizer was used for it.
    """
    found = read_config(path, trust_remote_code)
    own = load_tokenizer(path, trust_remote_code=trust_remote_code, for_chat=False).get_vocab()
    theirs = tokenizer.get_vocab()
    if others := [token for token, number in theirs.items() if own.get(token) != number]:
        example = min(others, key=theirs.__getitem__)
        raise ModelError(
            f"{path}: {len(others)} of the {len(theirs)} tokens of {model_path} have another id in its tokenizer, or "
            f"none: {example!r} is {theirs[example]} for the policy and {own.get(example, 'nothing')} here; {whose} "
            "reads the policy's token ids, so give one that was trained with the same tokenizer"
        )
    return RowLimits.of(found, whose)
