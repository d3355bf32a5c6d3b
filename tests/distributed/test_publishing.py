"""Weights between processes: they arrive, and nobody waits for one that was killed."""

import json
import os

import pytest
from ranks import run_ranks
from tiny_models import make_tiny_model

GONE = {"PeerFailedError", "MembershipLostError"}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What three of four processes said of each publish; the last one was killed in the midst of the third."""
    folder, before = tmp_path_factory.mktemp("said"), set(os.listdir("/dev/shm"))
    model = make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3")
    run_ranks("publish_rank", model, folder, statuses=[0, 0, 0, -9])
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "rallypoint" in name and "vllm" not in name], "other tests have servers"
    return [json.loads((folder / f"said by {place}.json").read_text()) for place in range(3)]


def test_two_halves_of_a_model_arrive_whole_in_two_other_processes(said):
    assert all((one["memory 1"], one["broadcast 2"]) == ("arrived", "arrived") for one in said)


def test_a_process_that_is_killed_is_noticed_at_once_by_all_who_need_it(said):
    """Long before the minute is over that they would wait for one that is silent."""
    senders = said[:2]
    assert all(one["memory 3"] in GONE for one in senders)
    assert all(one["broadcast 3"] in GONE for one in said)
