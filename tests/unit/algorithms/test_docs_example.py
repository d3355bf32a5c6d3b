"""The functions of docs/algorithms.md run, and keep to every rule."""

from collections.abc import Callable

import pytest
from docs_blocks import DOCS, blocks
from loss_terms import check_kl
from torch import Tensor

from rallypoint.algorithms import ADVANTAGES, CORRECTIONS, OBJECTIVES
from rallypoint.testing import ConformanceError


def test_the_functions_of_the_page_run_and_keep_to_every_rule():
    names: dict[str, object] = {}
    for block in blocks("algorithms", "python"):
        exec(block, names)
    assert {"my_loss", "my_advantage", "my_kl"} <= names.keys()


def test_the_kl_of_the_page_is_no_other_divergence_and_has_its_factor():
    names: dict[str, Callable[..., Tensor]] = {}
    for block in blocks("algorithms", "python"):
        exec(block, names)
    my_kl = names["my_kl"]
    with pytest.raises(ConformanceError, match="that of the forward divergence"):
        check_kl(my_kl, divergence="forward")
    with pytest.raises(ConformanceError, match="in expectation"):
        check_kl(lambda *tokens: 2 * my_kl(*tokens), divergence="reverse")


def test_every_name_is_on_the_page():
    page = (DOCS / "algorithms.md").read_text()
    assert [n for n in (*ADVANTAGES, *OBJECTIVES, *CORRECTIONS) if f"| `{n}`" not in page] == []
