"""Models of a few thousand weights, made by the project's own door, and folders of them."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.data import make_digits_tokenizer
from rallypoint.models import create_model


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory) -> Callable[..., str]:
    """Return a function that creates a model and returns its folder, which must not be changed."""

    @functools.cache
    def make(architecture="llama", *, num_heads=4, num_key_value_heads=2, tie_embeddings=False, seed=0) -> str:
        folder: Path = tmp_path_factory.mktemp("model")
        create_model(
            folder,
            make_digits_tokenizer(),
            architecture=architecture,
            hidden_size=16,
            num_layers=2,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            intermediate_size=32,
            tie_embeddings=tie_embeddings,
            initializer_range=0.3,
            max_positions=2048,
            seed=seed,
        )
        return str(folder)

    return make
