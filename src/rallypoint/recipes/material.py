"""What a run is made of before any role exists: model folder, tokenizer, prompts, reward function."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from rallypoint.config import CreateModelConfig, RunConfig
from rallypoint.data import (
    EncodedPrompts,
    encode_prompts,
    load_dataset,
    load_tokenizer,
    make_digits,
    make_digits_tokenizer,
)
from rallypoint.environments.reward import RewardFunction, load_reward
from rallypoint.errors import DataError, ModelError
from rallypoint.models import create_model
from rallypoint.recipes.run_folder import RunFolder


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """All that is read from disk on the driver."""

    model_path: str
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]
    train: EncodedPrompts
    validation: EncodedPrompts | None
    reward: RewardFunction


def prepare(config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> Material:
    """Make or load model folder, data and reward function.

    Args:
        config: of the run.
        folder: receives what is made.
        say: called with one line about what was left out.

    Raises:
        DataError: a data set has bad rows, or prompts that are too long.
        ModelError: the model folder or its tokenizer cannot be used.
        RewardError: the reward function cannot be loaded.
    """
    reward = load_reward(config.reward.function)
    train_paths, validation_paths = _data_paths(config, folder)
    model_path = config.model.path or str(_created_model(config, folder))
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(model_path, trust_remote_code=trust)
    check_model(model_path, tokenizer, config.max_row_tokens, trust_remote_code=trust)
    train = _encoded(config, tokenizer, train_paths, say)
    validation = _encoded(config, tokenizer, validation_paths, say) if validation_paths else None
    return Material(model_path, tokenizer, stop_tokens(model_path, tokenizer), train, validation, reward)


def stop_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's, and those of generation_config.json if there is one."""
    ids: list[object] = [tokenizer.eos_token_id]
    try:
        more = GenerationConfig.from_pretrained(model_path, local_files_only=Path(model_path).is_dir()).eos_token_id
    except OSError:
        more = None
    ids += more if isinstance(more, list) else [more]
    return tuple(sorted({token for token in ids if isinstance(token, int)}))


def check_model(
    model_path: str, tokenizer: PreTrainedTokenizerBase, max_row_tokens: int, *, trust_remote_code: bool
) -> None:
    """Compare the model's declared sizes with what the run asks of it.

    Raises:
        ModelError: the tokenizer has ids that the embedding lacks, or rows are longer than the model supports.
    """
    try:
        model = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"{model_path}: transformers cannot read config.json: {error}") from error
    check_vocabulary(model_path, tokenizer, model)
    longest = getattr(model, "max_position_embeddings", None)
    if longest is not None and max_row_tokens > longest:
        raise ModelError(
            f"{model_path}: supports rows of {longest} tokens, but data.max_prompt_tokens + "
            f"rollout.max_response_tokens = {max_row_tokens}; lower one of them"
        )


def check_vocabulary(model_path: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedConfig) -> None:
    """Refuse a tokenizer with ids that the model's embedding lacks.

    Raises:
        ModelError: there are such ids; both numbers are named.
    """
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ModelError(
            f"{model_path}: the tokenizer has {len(tokenizer)} ids, but the embedding only {vocab_size} rows; "
            "use the tokenizer that the model was trained with"
        )


def _data_paths(config: RunConfig, folder: RunFolder) -> tuple[tuple[str, ...], tuple[str, ...]]:
    generate = config.data.generate
    if generate is None:
        return config.data.train, config.data.validation
    try:
        train, validation = make_digits(
            folder.data,
            task=generate.task,
            num_digits=generate.num_digits,
            num_train_prompts=generate.num_train_prompts,
            num_validation_prompts=generate.num_validation_prompts,
        )
    except ValueError as error:
        raise DataError(f"data.generate: {error}") from error
    return (str(train),), (str(validation),)


def _created_model(config: RunConfig, folder: RunFolder) -> Path:
    """Make the model unless an earlier start of this run has; the folder appears when it is whole."""
    made = config.model.create
    assert isinstance(made, CreateModelConfig), "the config was checked: model.path or model.create"
    if not folder.model.is_dir():
        partial = folder.model.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        create_model(
            partial,
            make_digits_tokenizer(),
            max_positions=config.max_row_tokens,
            seed=config.seed,
            tie_embeddings=False,
            **made.model_dump(),
        )
        partial.rename(folder.model)
    return folder.model


def _encoded(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, paths: tuple[str, ...], say: Callable[[str], None]
) -> EncodedPrompts:
    encoded = encode_prompts(
        tokenizer,
        load_dataset(paths),
        max_prompt_tokens=config.data.max_prompt_tokens,
        on_too_long=config.data.on_too_long,
    )
    if encoded.dropped:
        shown = ", ".join(encoded.dropped[:3]) + (" ..." if len(encoded.dropped) > 3 else "")
        say(f"{len(encoded.dropped)} prompts are longer than data.max_prompt_tokens and were dropped: {shown}")
    return encoded
