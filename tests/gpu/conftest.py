"""A model that is large enough for its memory to be seen."""

import pytest
import torch

from rallypoint.data import make_digits_tokenizer
from rallypoint.models import create_model, load_policy


@pytest.fixture
def make_model(tmp_path):
    """Return a function that loads the same small Llama in bfloat16 again and again."""
    create_model(
        tmp_path / "model",
        make_digits_tokenizer(),
        architecture="llama",
        hidden_size=512,
        num_layers=8,
        num_heads=8,
        num_key_value_heads=4,
        intermediate_size=1024,
        tie_embeddings=False,
        initializer_range=0.02,
        max_positions=512,
        seed=0,
    )
    return lambda: load_policy(str(tmp_path / "model"), dtype=str(torch.bfloat16).removeprefix("torch.")).model
