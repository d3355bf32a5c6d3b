"""A publish never holds the model twice: not where it is sent, and not where it is taken."""

import json
import sys

import pytest
from ranks import run_ranks
from tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of the peak of a process")

FEW_BYTES = 6 * 4 * 2**20
"""Six of the largest buckets; a sender's half is more than twice as much, and more than that in half precision."""
LARGEST_BYTES = 4096 * 1024 * 4
"""Of the tensors."""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What two senders of a half and a taker measured; see `peak_rank`."""
    folder = tmp_path_factory.mktemp("peak")
    make_tiny_model(folder / "model", hidden_size=1024, intermediate_size=4096, num_layers=2, num_heads=8)
    run_ranks("peak_rank", make_tiny_model(folder / "small"), folder, statuses=[0, 0, 0])
    return [json.loads((folder / f"told by {place}.json").read_text()) for place in range(3)]


def test_a_sharded_rank_has_its_part_once_also_where_others_can_read_it(told):
    *senders, taker = told
    assert all(one["own"] * 2 == taker["own"] > 4 * FEW_BYTES for one in senders)
    assert all(one["loaded"] < one["own"] + FEW_BYTES for one in told)


@pytest.mark.parametrize("turn", ["first", "second"])
@pytest.mark.parametrize("way", ["memory", "broadcast", "folder", "folder of masters"])
def test_a_publish_takes_a_few_buckets_beside_the_own_model_everywhere(told, way, turn):
    """Only who writes a folder has a whole tensor, too; who takes in `memory` sees the senders' own pages."""
    *senders, taker = (one[f"{way}, {turn}"] for one in told)
    assert senders[0]["peak"] < FEW_BYTES + (LARGEST_BYTES if way.startswith("folder") else 0)
    assert senders[1]["peak"] < FEW_BYTES
    assert taker["peak"] - taker["mapped"] < FEW_BYTES + 2 * 4 * 2**20  # its reader has some on their way, too
    assert taker["mapped"] < (told[2]["own"] + FEW_BYTES if (way, turn) == ("memory", "first") else FEW_BYTES)
    assert all(one[f"{way}, {turn}"]["kept"] < FEW_BYTES for one in told)
