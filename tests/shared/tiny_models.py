"""Models of a few thousand random weights, in folders as ordinary as any other.

For tests, the programs that they start, and the fixtures of every folder: each says only the sizes that it is about.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerBase

from rallypoint.config.sections.material import Architecture
from rallypoint.data import make_digits_tokenizer, save_tokenizer
from rallypoint.model_files import create_model

TINY: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
"""Sizes for any config of transformers, where a test makes the model without us."""


def make_tiny_model(
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    architecture: Architecture = "llama",
    hidden_size: int = 16,
    num_layers: int = 2,
    num_heads: int = 4,
    num_key_value_heads: int = 2,
    intermediate_size: int = 32,
    tie_embeddings: bool = False,
    initializer_range: float = 0.3,
    max_positions: int = 64,
    seed: int = 0,
) -> str:
    """Write a policy and its tokenizer (by default that of digits, with 20 ids) to a folder, and return the folder."""
    create_model(
        folder,
        tokenizer or make_digits_tokenizer(),
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        intermediate_size=intermediate_size,
        tie_embeddings=tie_embeddings,
        initializer_range=initializer_range,
        max_positions=max_positions,
        seed=seed,
    )
    return str(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change what config.json says."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a folder's one file."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_tiny_reward_model(folder: Path, *, likes: str = "7", num_labels: int = 1, **changes: Any) -> str:
    """Write a reward model that scores a row the higher, the more of one token it has, and return the folder.

    Its one layer looks at all tokens alike, so that a state is their mean and the last token.
    """
    tokenizer, size = make_digits_tokenizer(), 32
    sizes = TINY | {"vocab_size": len(tokenizer), "hidden_size": size, "num_hidden_layers": 1, "pad_token_id": None}
    model = LlamaForSequenceClassification(LlamaConfig(**{**sizes, "num_labels": num_labels, **changes}))
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
        width = attention.k_proj.out_features
        attention.v_proj.weight.copy_(torch.eye(width, size))
        attention.o_proj.weight[:, :width] = torch.eye(size, width)
        model.score.weight[:, tokenizer.get_vocab()[likes]] = 1.0
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)
