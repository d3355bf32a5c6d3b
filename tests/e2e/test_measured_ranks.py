"""What a run keeps of its ranks' time: what each did in a step, and a profile where one was asked for."""

import json

import pytest
from tiny_runs import Runs

from rallypoint.journal import read_journal
from rallypoint.run.trace import trace

INLINE = ("recipe=grpo", "cluster.runtime=inline", "cluster.pools={main: [1]}", "trainer.num_steps=2")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A run whose second step was recorded."""
    folder = tmp_path_factory.mktemp("profiled")
    return Runs(folder).run("profiled", *INLINE, "trainer.profile=2:2", recipe="digits-grpo")


def test_the_journal_has_what_each_rank_did_and_when_each_phase_began(profiled):
    steps = list(profiled.state().steps.values())
    assert len(steps) == 2
    for done in steps:
        assert set(done.work) == {"actor", "rollout", "reference"}
        names = {role: {name for name, *_ in ranks[0]} for role, ranks in done.work.items()}
        assert {"logprobs", "train"} <= names["actor"]
        assert names["rollout"] == {"sample"}
        for ranks in done.work.values():
            for _, began_s, ended_s, seconds, num in ranks[0]:
                assert began_s <= ended_s
                assert 0 <= seconds <= ended_s - began_s + 1e-3
                assert num >= 1
        phases = [done.begins[name] for name in ("rollout", "judge", "learn", "publish")]
        assert phases == sorted(phases)
        assert done.began_s > 0


def test_a_trace_of_the_run_has_every_rank(profiled):
    events = trace(read_journal(profiled.journal), range(1, 3))["traceEvents"]
    named = {one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert {"driver", "actor", "rollout", "rollout groups", "reference"} <= named
    assert {one["ph"] for one in events} == {"M", "X", "C", "s", "f"}


def test_a_recorded_step_leaves_a_file_for_each_call_of_each_role_and_has_the_same_bits(profiled, runs, weights_of):
    files = sorted(path.name for path in (profiled.path / "profile").iterdir())
    assert "step-000002-actor-rank0-train.json" in files
    assert "step-000002-rollout-rank0-sample.json" in files
    assert all(name.startswith("step-000002-") for name in files)
    recorded = json.loads((profiled.path / "profile" / "step-000002-actor-rank0-train.json").read_text())
    assert any("mm" in event.get("name", "") for event in recorded["traceEvents"])
    plain = runs.run("plain", *INLINE, recipe="digits-grpo")
    assert not (plain.path / "profile").exists()
    assert weights_of(plain) == weights_of(profiled)
