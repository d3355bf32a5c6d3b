"""A run in training is asked over HTTP, also by who means harm, and ends with the weights of one that nobody asked."""

import pytest
from outsider import Caller

pytestmark = pytest.mark.lasting_ray

ONE = "cluster.pools={main: [1]}"
SPLIT = ("cluster.pools={main: [1], second: [1]}", "rollout.placement.pool=second")
LONG = "trainer.num_steps=8"


@pytest.mark.parametrize("placement", [pytest.param((ONE,), marks=pytest.mark.slow), SPLIT], ids=["colocated", "split"])
def test_a_run_that_is_asked_while_it_trains_ends_with_the_same_weights(runs, weights_of, placement):
    alone = runs.run("alone", *placement, LONG, "cluster.runtime=inline")
    caller = Caller(runs.folder / "asked", num_half_open=300)
    caller.start()
    asked = runs.run("asked", *placement, LONG, "rollout.serve=0")
    caller.join(60)
    assert not caller.is_alive()
    assert weights_of(asked) == weights_of(alone)
    assert caller.mode == 0o600
    assert caller.statuses[0] == 401
    assert set(caller.statuses[1:]) <= {200, 500, 503}
    assert not (asked.path / "endpoint.key").exists()
    versions = {version for answer in caller.answers for choice in answer["choices"] for version in choice["versions"]}
    assert len(versions) > 1, caller.statuses
    assert versions <= set(range(17))
    assert all(len(answer["choices"]) == 3 for answer in caller.answers)
    by_version = {
        (choice["index"], *choice["versions"][:1]): choice["token_ids"]
        for answer in caller.answers
        for choice in answer["choices"]
        if len(set(choice["versions"])) == 1
    }
    for answer in caller.answers:
        for choice in answer["choices"]:
            if len(set(choice["versions"])) == 1:
                assert choice["token_ids"] == by_version[choice["index"], choice["versions"][0]]
    assert any(text.endswith("data: [DONE]\n\n") for text in caller.streamed)
