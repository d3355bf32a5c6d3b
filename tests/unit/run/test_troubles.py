"""Known troubles of a run, each planted in a journal, and a sound run that has none."""

import math
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted_runs import SLOW_RANK, planted_run
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.config import load_config, values_of
from rallypoint.errors import RunFolderError
from rallypoint.journal import (
    BatchTaken,
    CheckpointSaved,
    Entry,
    Journal,
    RoleLost,
    RolesRestarted,
    RolesStarted,
    RunBegan,
    RunEnded,
    StepDone,
    Validated,
)
from rallypoint.run.folder import RunFolder
from rallypoint.run.troubles import troubles, troubles_of

BEGAN = RunBegan(first=0, config={"actor.num_epochs": 1}, software={}, machine="")
END = RunEnded(how="finished")


def sound(step: int, num_steps: int) -> dict[str, float]:
    """Return the numbers of a step of a run that learns."""
    noise = random.Random(step).uniform(-1, 1)
    return {
        "reward/mean": 0.2 + 0.6 * step / num_steps + 0.02 * noise,
        "reward/std": 0.3,
        "reward/failed": 0,
        "rollout/failed": 0,
        "rollout/truncated": 0.02,
        "rollout/response_length": 100 + 5 * noise,
        "rollout/logprob_gap_mean": 1e-3,
        "rollout/num_tokens": 1000,
        "actor/without_signal": 0.3,
        "actor/entropy": 1.0,
        "actor/approx_kl": 0.004,
        "actor/clip_fraction": 0.1,
        "actor/grad_norm": 0.5,
        "kl/reference_mean": 0.1,
        "time_s/rollout": 5.0,
        "time_s/learn": 4.0,
    }


def steps(num_steps=80, **planted):
    """Return the steps of a run, with other numbers where they are planted: metric -> function of the step."""
    named = {name.replace("__", "/"): value for name, value in planted.items()}
    return [
        StepDone(
            step=step,
            metrics=sound(step, num_steps) | {name: value(step) for name, value in named.items()},
            digests={},
            seconds=10.0,
        )
        for step in range(1, num_steps + 1)
    ]


def taken(step, *busy_s):
    return BatchTaken(step=step, prompts=(), asked_s=0.0, taken_s=max(busy_s), loaded_s=0.0, busy_s=busy_s)


def found(*events, times=None):
    times = times or [10.0 * number for number in range(len(events))]
    pairs = zip(times, events, strict=True)
    return {one.words: one for one in troubles(Entry(number, at, event) for number, (at, event) in enumerate(pairs))}


def test_a_sound_run_has_no_trouble():
    assert found(BEGAN, *steps(), END) == {}


KILLED = (BEGAN, *steps(40), BEGAN, *steps(80), END)
LOST = RoleLost(role="rollout", rank=1, step=7, why="worker died: out of memory")
STARTED = RolesStarted(step=0, metrics={}, processes={"rollout": ["1@a", "2@b"]})
BUSY = [taken(step, 4.0, 7.0) for step in range(1, 11)]
SLOW_VALIDATION = [Validated(step=step, metrics={"time_s/validate": 10.0}) for step in range(1, 81)]
SLOW_SAVING = [CheckpointSaved(step=step, weights="", metrics={"time_s/checkpoint": 9.0}) for step in range(1, 81)]


FALL = {
    "reward__mean": lambda step: 0.5 if step <= 60 else 0.1,
    "actor__approx_kl": lambda step: 0.3 if step > 60 else 0.003,
}
SHORTER = steps(rollout__response_length=lambda step: max(1.0, 100 - 2 * step))
FAILED = RunEnded(how="failed", why="ModelError: no\nmore")


def after(start, high, low):
    """Return a function of the step: one value, then another."""
    return lambda step: high if step > start else low


@pytest.mark.parametrize(
    ("events", "words", "level", "said", "where", "key"),
    [
        (
            (BEGAN, *steps(actor__without_signal=lambda step: 0.74)),
            *("groups without signal", "watch", "50% in 80 of 80 steps: mean 74%", (1, 80), "dynamic_sampling"),
        ),
        (
            (BEGAN, *steps(time_s__rollout=lambda step: 8.0, time_s__learn=lambda step: 2.0)),
            *("rollout takes most of the time", "watch", "80% of the time", (1, 80), "cluster.pools"),
        ),
        (
            (BEGAN, *steps(reward__mean=lambda step: 0.5, kl__reference_mean=lambda step: step / 40)),
            *("KL grows, the reward does not", "watch", "kl/reference_mean 0.762 -> 1.76", (21, 80), "kl.coef"),
        ),
        (
            (BEGAN, *steps(rollout__truncated=lambda step: 0.7)),
            *("rollouts truncated", "bad", "70%", (1, 80), "rollout.max_response_tokens"),
        ),
        (
            (BEGAN, *steps(reward__failed=lambda step: 3 if step == 9 else 0)),
            *("rewards failing", "bad", "1 of 80 steps: 3.00 (step 9)", (9, 9), "reward.function"),
        ),
        (
            (BEGAN, *steps(rollout__logprob_gap_mean=after(70, 0.05, 0.001))),
            *("rollout/train gap", "watch", "above 0.0200 in 10 of 80 steps: mean 0.0500", (71, 80), "model.dtype"),
        ),
        (
            (BEGAN, *steps(actor__entropy=after(40, 0.01, 1.0), reward__mean=lambda step: 0.2 + step / 400)),
            *("entropy collapsed", "bad", "below 0.100 in 40 of 80", (41, 80), "rollout.temperature"),
        ),
        (
            (BEGAN, *steps(actor__loss=lambda step: math.nan if step == 5 else 0.1)),
            *("actor/loss not finite", "bad", "nan", (5, 5), "actor.optimizer.lr"),
        ),
        (
            (BEGAN, *steps(**FALL)),
            *("reward fell", "bad", "approx_kl 0.0030 -> 0.300 from step 61 on", (None, 80), "optimizer.lr"),
        ),
        (
            (BEGAN, *SHORTER),
            *("answers vanish, and earn more", "bad", "79.0 -> 1.00 tokens", (None, 80), "reward.function"),
        ),
        (
            (BEGAN, STARTED, *BUSY, *steps()),
            *("rollout rank 1 is slow", "watch", "the others 4.00 s; slowest in 10 of 10", (1, 80), "2@b"),
        ),
        (KILLED, "done again", "watch", "40 steps", (None, None), "checkpoint.every_steps"),
        (KILLED, "killed", "watch", "1 start without an end, after step 40", (None, None), "kill -9"),
        ((BEGAN, LOST, *steps()), "rollout lost a process", "watch", "out of memory", (7, 7), "cache_tokens"),
        ((BEGAN, *steps(), *SLOW_VALIDATION), "validation takes long", "watch", "13 min", (None, None), "every_steps"),
        ((BEGAN, *steps(), *SLOW_SAVING), "saving takes long", "watch", "12 min", (None, None), "every_steps"),
        ((BEGAN, FAILED), "failed", "bad", "ModelError: no", (None, None), "logs"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)  # fmt: skip
def test_each_planted_trouble_is_found_with_its_number_steps_and_key(events, words, level, said, where, key):
    trouble = found(*events)[words]
    assert trouble.level == level
    assert said in trouble.evidence
    assert key in trouble.advice
    first, last = where
    assert trouble.last == last
    assert first is None or trouble.first == first


def test_what_follows_from_another_trouble_comes_after_it_and_says_so():
    slow = steps(time_s__rollout=lambda step: 8.0, time_s__learn=lambda step: 2.0)
    events = [BEGAN, STARTED, *BUSY, *slow]
    words = [one.words for one in troubles(Entry(number, number, event) for number, event in enumerate(events))]
    assert words.index("rollout rank 1 is slow") < words.index("rollout takes most of the time")
    late = found(*events)["rollout takes most of the time"]
    assert late.follows == "rollout rank 1 is slow"
    assert "cluster.pools" not in late.advice
    silent = steps(actor__approx_kl=after(20, 0.3, 0.001), actor__without_signal=after(40, 1.0, 0.1))
    assert found(BEGAN, *silent)["groups without signal"].follows == "update kl high"
    earlier = steps(actor__approx_kl=after(40, 0.3, 0.001), actor__without_signal=after(20, 1.0, 0.1))
    assert found(BEGAN, *earlier)["groups without signal"].follows == ""


def test_a_fall_of_the_reward_is_dated_to_the_steps_in_which_it_fell():
    falling = steps(**FALL)
    saved = CheckpointSaved(step=40, weights="")
    trouble = found(BEGAN, *falling[:40], saved, *falling[40:])["reward fell"]
    assert 50 <= (trouble.first or 0) <= 61
    assert "--from-step 40" in trouble.advice


def test_a_reward_that_fell_is_told_although_one_step_had_none():
    events = steps(reward__mean=lambda step: math.nan if step == 3 else 0.5 if step <= 60 else 0.1)
    assert found(BEGAN, *events)["reward fell"].level == "bad"


def test_a_rank_that_was_made_anew_is_named_by_its_new_process():
    first = RolesStarted(step=0, metrics={}, processes={"rollout": ["1@a", "2@a"], "actor": ["3@a"]})
    again = RolesRestarted(first=None, seconds=1.0, processes={"rollout": ["1@a", "9@b"]})
    batches = [taken(step, 4.0, 11.0) for step in range(1, 81)]
    slow = found(BEGAN, first, again, *batches, *steps())["rollout rank 1 is slow"]
    assert "process 9@b" in slow.advice


def test_nobody_expects_a_policy_to_learn_while_its_learning_rate_warms_up():
    flat = steps(100, reward__mean=lambda step: 0.2 + 0.01 * (step % 2))
    config = dict(
        values_of(load_config("digits-grpo", ["actor.optimizer.warmup_ratio=0.9", "trainer.num_steps=100"]).config)
    )
    slow = RunBegan(first=0, config=config, software={}, machine="")
    assert "not learning" in found(BEGAN, *flat)
    assert "not learning" not in found(slow, *flat)


def test_a_run_without_rewards_is_not_told_that_it_does_not_learn():
    losses = [StepDone(step=step, metrics={"actor/loss": 1.0}, digests={}, seconds=1.0) for step in range(1, 200)]
    assert "not learning" not in found(BEGAN, *losses)


def test_a_run_that_was_killed_and_not_resumed_says_so(tmp_path):
    run = planted_run(tmp_path, num_steps=2, prompts=2, group=2)
    assert "killed" in {one.words for one in troubles_of(run)}
    with RunFolder(run).locked():
        assert "killed" not in {one.words for one in troubles_of(run)}


def test_a_clock_that_was_set_back_is_named_with_its_line():
    said = found(BEGAN, *steps(3), times=[100.0, 110.0, 75.0, 85.0])["clock was set back"].evidence
    assert said == "35.0 s back at line 2 of journal.jsonl"


def test_the_fault_of_each_planted_run_is_found(tmp_path):
    kinds = {"hot": 80, "straggler": 12, "empty": 48, "impossible": 12, "sound": 12}
    of_run = {}
    for kind, num in kinds.items():
        path = planted_run(tmp_path, kind, num_steps=num, last="finished", prompts=4, group=4)
        of_run[kind] = {one.words: one for one in troubles_of(path)}
    faults = {
        "hot": "reward fell",
        "straggler": f"rollout rank {SLOW_RANK} is slow",
        "empty": "answers vanish, and earn more",
        "impossible": "prompts that nobody solves",
    }
    assert of_run["impossible"]["groups without signal"].follows == "prompts that nobody solves"
    for kind, words in faults.items():
        assert [other for other, found in of_run.items() if words in found] == [kind]
    assert "actor/approx_kl 0.0045 -> 0.300 from step 60 on" in of_run["hot"]["reward fell"].evidence


def write_rollouts(folder, step, rows):
    (folder / "rollouts").mkdir(exist_ok=True, parents=True)
    names, indices, scores = zip(*rows, strict=True)
    table = pa.table({"name": names, "prompt_index": indices, "score": pa.array(scores, pa.float64())})
    pq.write_table(table, folder / "rollouts" / f"step_{step:06d}.parquet")


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose odd prompts nobody solves, with a damaged file of rollouts."""
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(BEGAN, *steps(8, rollout__truncated=lambda step: 0.7), END)
    (tmp_path / "config.yaml").write_text("recipe: grpo\n")
    for step in range(1, 5):
        rows = [(f"t:{at}", 8 * step + at, 0.0 if at % 2 or sample else 1.0) for at in range(8) for sample in range(4)]
        write_rollouts(tmp_path, step, [*rows, ("t:1", 9, None)])
    (tmp_path / "rollouts" / "step_000005.parquet").write_text("no parquet")
    return tmp_path


def test_prompts_that_nobody_solves_are_counted_from_the_rollouts_and_a_damaged_file_costs_itself_only(run):
    of_run = {one.words: one for one in troubles_of(run)}
    never = of_run["prompts that nobody solves"]
    assert (
        "lowest score, in all of their 16 groups in the last 5 steps with rollouts: t:1, t:3, t:5 and 1 more"
        in never.evidence
    )
    assert (never.first, never.prompts) == (None, ("t:1", "t:3", "t:5", "t:7"))
    assert of_run["rollouts damaged"].first == 5


def test_the_command_prints_the_worst_first_and_exits_with_1_if_something_is_bad(run):
    result = CliRunner().invoke(app, ["doctor", str(run)])
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "✖ rollouts truncated, steps 1 to 8"
    assert lines[1].startswith("  rollout/truncated above 20% in 8 of 8 steps: mean 70%")
    assert lines[2].startswith("  -> raise rollout.max_response_tokens")


def test_a_folder_without_a_journal_is_refused_by_name(tmp_path):
    with pytest.raises(RunFolderError, match=r"expected the folder of a run, with a journal\.jsonl"):
        troubles_of(tmp_path)
