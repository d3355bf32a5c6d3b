"""Tests that drive a real vLLM server, in the environment that `rally engine install vllm` makes."""

import pytest

from rallypoint.errors import EngineError
from rallypoint.install import Installed, find_engine


@pytest.fixture(scope="session")
def installed() -> Installed:
    """The environment; without it the tests say what makes one."""
    try:
        return find_engine("vllm")
    except EngineError as error:
        pytest.skip(str(error))
