"""A model that is large enough for its memory to be seen."""

import pytest
import torch
from tiny_models import make_tiny_model

from rallypoint.models import load_policy


@pytest.fixture
def make_model(tmp_path):
    """Return a function that loads the same small Llama in bfloat16 again and again."""
    folder = make_tiny_model(
        tmp_path / "model",
        hidden_size=512,
        num_layers=8,
        num_heads=8,
        num_key_value_heads=4,
        intermediate_size=1024,
        initializer_range=0.02,
        max_positions=512,
    )
    return lambda: load_policy(folder, dtype=str(torch.bfloat16).removeprefix("torch.")).model
