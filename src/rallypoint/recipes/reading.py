"""What is read before a run begins, in `rally train` and in its `--dry-run`: tokenizer, prompts, reward function.

Owns: what can be known of them without a role. Must not know: run folders; nothing is written here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from rallypoint.config import OnTooLong, RunConfig
from rallypoint.data import (
    EncodedPrompts,
    Example,
    encode_prompts,
    load_dataset,
    load_tokenizer,
    make_digits_tokenizer,
)
from rallypoint.environments.pool import probe_reward
from rallypoint.errors import ModelError, RewardError
from rallypoint.model_files import load_critic, load_policy, load_reward_model
from rallypoint.model_files.locate import quiet_transformers, read_config


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a run begins with, but for what it makes for itself."""

    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]
    limits: tuple[Limits, ...]
    """Of every model that reads the rows."""
    train: EncodedPrompts | None
    """None where data.generate makes them."""
    validation: EncodedPrompts | None
    notes: tuple[str, ...] = ()
    """What there is to say of the prompts, a line each."""

    def encode(
        self, config: RunConfig, paths: Sequence[str | Path], say: Callable[[str], None], max_rows: int | None = None
    ) -> EncodedPrompts:
        """Read files of prompts and encode them for the models of a run.

        Raises:
            DataError: they have bad rows, or prompts that are too long.
            ModelError: a model does not support rows of the length that the config asks for.
        """
        num_ids = [each.num_ids for each in self.limits if each.num_ids is not None]
        rows = load_dataset(paths, max_rows=max_rows)
        encoded = encode_all(
            self.tokenizer,
            rows,
            max_prompt_tokens=min(each.max_prompt_tokens(config) for each in self.limits),
            on_too_long=config.data.on_too_long,
            num_ids=min(num_ids, default=None),
            say=say,
        )
        return dataclasses.replace(encoded, is_part=rows.is_part)


def read_material(config: RunConfig, *, max_rows: int | None = None) -> Found:
    """Read everything that a run begins with.

    Args:
        config: of the run.
        max_rows: of training and of validation prompts each; None for all.

    Raises:
        DataError: a data set has bad rows, or prompts that are too long.
        ModelError: the model folder, that of the reward model, or a tokenizer of theirs cannot be used.
        RewardError: the reward function cannot be loaded.
    """
    quiet_transformers()
    if config.reward.function is not None and (problem := probe_reward(config.reward.function)) is not None:
        raise RewardError(problem)
    tokenizer, stops, limits = _read_models(config)
    found = Found(tokenizer, stops, limits, None, None)
    if config.data.generate is not None:
        return found
    notes: list[str] = []
    train = found.encode(config, config.data.train, notes.append, max_rows)
    validation = (
        found.encode(config, config.data.validation, notes.append, max_rows) if config.data.validation else None
    )
    notes += repetitions(config, train, validation)
    return dataclasses.replace(found, train=train, validation=validation, notes=tuple(notes))


def _read_models(config: RunConfig) -> tuple[PreTrainedTokenizerBase, tuple[int, ...], tuple[Limits, ...]]:
    """Return the policy's tokenizer, the ids that end a response, and what every model says of rows."""
    path, trust = config.model.path, config.model.trust_remote_code
    if path is None:
        tokenizer = make_digits_tokenizer()
        limits = [Limits(len(tokenizer), config.max_row_tokens)]
        stops = (cast("int", tokenizer.eos_token_id),)
        path = "model.create"
    else:
        model = read_config(path, trust)  # before the tokenizer, which would be blamed for what is wrong in it
        tokenizer = load_tokenizer(path, trust_remote_code=trust)
        check_vocabulary(path, tokenizer, model)
        limits = [Limits.of(model)]
        stops = stop_tokens(path, tokenizer, limits[0].num_ids)
    own = config.own_models
    if "critic" in own:  # it reads the same rows
        critic = read_config(own["critic"], trust)
        check_vocabulary(own["critic"], tokenizer, critic)
        limits.append(Limits.of(critic, "the critic"))
    if "reward" in own:
        limits.append(check_reward_model(own["reward"], path, tokenizer, trust_remote_code=trust))
    return tokenizer, stops, tuple(limits)


def check_weights(config: RunConfig) -> None:
    """Compare the weights of the folders that a run begins with with their config.json, by the headers of the files.

    Models that are made anew, or come from the hub, are left to the run.

    Raises:
        ModelError: a run would refuse them too.
    """
    own = config.own_models
    critic = own.get("critic", config.model.path) if "critic" in config.roles else None
    folders = (config.model.path, load_policy), (critic, load_critic), (own.get("reward"), load_reward_model)
    for path, load in folders:
        if path is not None and Path(path).expanduser().is_dir():
            load.check(path, trust_remote_code=config.model.trust_remote_code)


def stop_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase, num_ids: int | None) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's, and those of generation_config.json if there is one.

    Those that the model, which knows `num_ids`, cannot draw are left out: it may have been given a smaller vocabulary.
    """
    ids: list[object] = [tokenizer.eos_token_id]
    try:
        more = GenerationConfig.from_pretrained(model_path, local_files_only=Path(model_path).is_dir()).eos_token_id
    except OSError:
        more = None
    ids += more if isinstance(more, list) else [more]
    known = range(num_ids) if num_ids is not None else range(2**31)
    return tuple(sorted({token for token in ids if isinstance(token, int) and token in known}))


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What a model's config.json says of the rows that it takes; None where it says nothing."""

    num_ids: int | None
    """Rows of the embedding."""
    max_positions: int | None
    whose: str = "the model"

    @classmethod
    def of(cls, model: PreTrainedConfig, whose: str = "the model") -> Limits:
        """Read them from a config that transformers has loaded."""
        return cls(getattr(model, "vocab_size", None), getattr(model, "max_position_embeddings", None), whose)

    def max_prompt_tokens(self, config: RunConfig) -> int:
        """Return how long prompts may be: as the config says, or less where longer ones are not an error.

        Raises:
            ModelError: the model does not support rows of the length that the config asks for.
        """
        wanted, most = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        if self.max_positions is None or config.max_row_tokens <= self.max_positions:
            return wanted
        if config.data.on_too_long == "error" or most >= self.max_positions:
            raise ModelError(
                f"{self.whose} supports rows of {self.max_positions} tokens, but data.max_prompt_tokens + "
                f"rollout.max_response_tokens = {config.max_row_tokens}; lower one of them"
            )
        return self.max_positions - most


def check_vocabulary(model_path: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedConfig) -> None:
    """Refuse a tokenizer with ids that the embedding of a model, policy or critic, lacks.

    Raises:
        ModelError: there are such ids; both numbers are named.
    """
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ModelError(
            f"{model_path}: the tokenizer has {len(tokenizer)} ids, but the embedding only {vocab_size} rows; "
            "use the tokenizer that the model was trained with"
        )


def check_reward_model(
    path: str, model_path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> Limits:
    """Refuse a reward model that cannot read the policy's rows, as it is given their token ids; return its limits.

    Args:
        path: of the reward model.
        model_path: of the policy.
        tokenizer: of the policy.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        ModelError: it is no reward model, or another tokenizer was used for it.
    """
    found = read_config(path, trust_remote_code)
    load_reward_model.check_config(path, found)
    own = load_tokenizer(path, trust_remote_code=trust_remote_code, for_chat=False).get_vocab()
    theirs = tokenizer.get_vocab()
    if others := [token for token, number in theirs.items() if own.get(token) != number]:
        example = min(others, key=theirs.__getitem__)
        raise ModelError(
            f"{path}: {len(others)} of the {len(theirs)} tokens of {model_path} are others in its tokenizer, or none: "
            f"{example!r} is {theirs[example]} for the policy and {own.get(example, 'nothing')} here; a reward model "
            "reads the policy's token ids, so give one that was trained with the same tokenizer"
        )
    check_vocabulary(path, tokenizer, found)
    return Limits.of(found, "the reward model")


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    on_too_long: OnTooLong,
    num_ids: int | None,
    say: Callable[[str], None],
) -> EncodedPrompts:
    """Encode prompts and say which of them were too long; see `encode_prompts`."""
    found = encode_prompts(
        tokenizer, examples, max_prompt_tokens=max_prompt_tokens, on_too_long=on_too_long, num_ids=num_ids
    )
    for names, fate in ((found.dropped, "dropped"), (found.truncated, "cut at their beginning")):
        if names:
            shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            say(f"{len(names)} prompts are longer than {max_prompt_tokens} tokens and were {fate}: {shown}")
    return found


def repetitions(config: RunConfig, train: EncodedPrompts, validation: EncodedPrompts | None) -> Iterator[str]:
    """Yield what there is to say of prompts that a step, or training and validation, have more than once."""
    wanted, repeats = config.rollout.num_prompts, train.repeats()
    if repeats and config.data.generate is None:  # a small task is repeated on purpose
        (first, again), others = repeats[0], sum(one.ground_truth != before.ground_truth for before, one in repeats)
        yield (
            f"{len(repeats):,} of {len(train.examples):,} prompts stand there before: the first is {again.name}, the "
            f"same as {first.name}" + (f"; {others:,} of them with another ground truth" if others else "")
        )
    if train.num_distinct < wanted and not train.is_part:
        yield (
            f"a step takes rollout.num_prompts={wanted} prompts, and the data have only {train.num_distinct:,} that "
            f"differ: every step samples the same ones {-(-wanted // train.num_distinct)} times; lower "
            "rollout.num_prompts and raise rollout.group_size, or add data"
        )
    if validation is not None and (shared := set(validation.token_ids) & set(train.token_ids)):
        num_rows = sum(ids in shared for ids in validation.token_ids)
        yield (
            f"{num_rows:,} of {len(validation.examples):,} validation prompts are trained on too: validation/score "
            "will say more than is true"
        )
