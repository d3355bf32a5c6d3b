"""The slow, plainly right formulas that the algorithms are compared with."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The slow, plainly right formulas in reference.py, which importlib mode cannot import by name."""
    spec = importlib.util.spec_from_file_location("algorithms_reference", Path(__file__).with_name("reference.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
