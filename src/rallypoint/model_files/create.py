"""Small models with random weights, saved as ordinary Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from rallypoint.config.sections.material import Architecture
from rallypoint.data import save_tokenizer
from rallypoint.disk import naming, naming_tensors
from rallypoint.families.kinds import small_model
from rallypoint.model_files.locate import SINGLE, quiet_transformers
from rallypoint.models import MAKING


def create_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    architecture: Architecture,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    tie_embeddings: bool,
    initializer_range: float,
    max_positions: int,
    seed: int,
) -> None:
    """Write a model and its tokenizer to a folder that `from_pretrained` opens.

    Args:
        folder: created if needed.
        tokenizer: gives the vocabulary size and the special tokens.
        architecture: the family in transformers.
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_heads: attention heads; must divide hidden_size.
        num_key_value_heads: must divide num_heads.
        intermediate_size: width inside the MLP; see `small_model`.
        tie_embeddings: whether input and output embeddings are one matrix.
        initializer_range: standard deviation of the initial weights.
        max_positions: longest row that the model declares to support, in tokens.
        seed: of the weights.

    Raises:
        DiskError: the disk is full or not writable.
    """
    quiet_transformers()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "intermediate_size": intermediate_size,
    }
    config = AutoConfig.for_model(
        architecture,
        tie_word_embeddings=tie_embeddings,
        initializer_range=initializer_range,
        max_position_embeddings=max_positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,  # with one, transformers would never train that id's embedding
        **small_model(architecture, sizes),
    )
    with MAKING, torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with naming(folder), naming_tensors(folder / SINGLE):
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)
