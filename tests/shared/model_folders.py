"""Models of a few thousand weights, made by the project's own door, and folders of them."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory) -> Callable[..., str]:
    """Return a function that creates a model and returns its folder, which must not be changed."""

    @functools.cache
    def make(architecture="llama", *, num_heads=4, num_key_value_heads=2, tie_embeddings=False, seed=0) -> str:
        folder: Path = tmp_path_factory.mktemp("model")
        return make_tiny_model(
            folder,
            architecture=architecture,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            tie_embeddings=tie_embeddings,
            max_positions=2048,
            seed=seed,
        )

    return make


@pytest.fixture
def folder(make_folder, tmp_path) -> Path:
    """A folder of a policy that may be damaged."""
    shutil.copytree(make_folder(), tmp_path / "model")
    return tmp_path / "model"
