"""A model that is large enough for its memory to be seen.

With RALLYPOINT_PRETEND these tests run on the pretend device, those of them that it has patience for: see
tests/unit/test_pretend_device.py.
"""

import os

import pytest
import torch
from tiny_models import make_tiny_model

from rallypoint.engine.determinism import prepare_process
from rallypoint.model_files import load_policy

if os.environ.get("RALLYPOINT_PRETEND"):
    from pretend_device import install

    install()
if torch.accelerator.is_available():
    prepare_process()  # as every worker does, before the device is used


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
