"""Runs that take seconds, below a folder of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_runs
from tiny_runs import Runs

from rallypoint.run.folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture(scope="session")
def weights_of() -> Callable[[RunFolder], dict[str, str]]:
    """See `tiny_runs.weights_of`."""
    return tiny_runs.weights_of
