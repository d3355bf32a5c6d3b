"""Rollouts of every step lie in the run's folder, whole or not at all, and never take more room than they may."""

import contextlib
import dataclasses
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from heard import heard

from rallypoint.data.dataset import Example, Message
from rallypoint.environments.failures import RewardFailure
from rallypoint.environments.scored import Scored
from rallypoint.errors import RunFolderError
from rallypoint.run.rollouts import RolloutFiles, read_rollouts, rollout_files
from rallypoint.run.step_rollouts import AT_MEAN, NO_SCORE, NO_SIGNAL, REPLACED, TRUNCATED, StepRollouts
from rallypoint.types import ActorBatch, Metrics, Trajectory, Turn, assemble

GIB = 2**30


def turn(prompt, response, logprobs, *, truncated=False, version=3):
    return Turn(
        prompt=prompt,
        response=response,
        logprobs=logprobs,
        sampled_logprobs=logprobs,
        version=version,
        truncated=truncated,
    )


def example(source="sums", *more: Message):
    messages = (*more, Message("user", "2+2"))
    return Example("train.parquet:17", source, messages, "", 4, {})


def step_rollouts(*, learned: bool = True, examples=None, texts=("4", "5", "\udc80")) -> StepRollouts:
    """Three rollouts of one prompt: 4 of one turn, one of two turns that has no score, and one cut off."""
    two = (turn((5, 6), (7,), (-1.0,)), turn((8, 9), (4,), (-2.0,)))
    rows = assemble(
        [
            Trajectory(turns=(turn((5, 6), (7, 2), (-0.5, -0.25)),)),
            Trajectory(turns=two),
            Trajectory(turns=(turn((5, 6), (3,), (-4.0,), truncated=True, version=2),)),
        ],
        prompt_index=11,
        sample_index=[0, 1, 2],
        is_narrowed=False,
    )
    kept = rows.rows([0, 2])
    rewards = torch.tensor([0, 0, 0, 1.0, 0, 0, 0.25])
    parts = torch.tensor([[1.0, float("nan")], [0.0, 0.5]], dtype=torch.float64)  # `short` does not apply to the first
    batch = kept.scored(rewards, parts, ("right", "short"))
    scored = Scored(
        batch=batch,
        kept_rows=(0, 2),
        failures=(RewardFailure("train.parquet:17", 1, 1, "timeout", "took too long", ""),),
        extras=({"acc": 1.0}, {}),
        answers=("4", None),
        metrics=Metrics(),
    )
    turned = kept.rows([1, 0])  # an actor may take rows in any order
    batch = ActorBatch(
        **{name: getattr(turned, name) for name in ("offsets", "tokens", "loss_mask", "prompt_index", "sample_index")},
        rollout_logprobs=turned.rollout_logprobs,
        old_logprobs=None,
        reference_logprobs=None,
        advantages=torch.tensor([0, 0, -0.5, 0, 0, 0.5, 0.75]),
        entropies=torch.tensor([0, 0, 0.5, 0, 0, 0.25, 1.5]),
    )
    return StepRollouts(rows, scored, examples or [example()] * 3, texts, batch if learned else None)


def files_in(folder: Path, *, max_gib=1.0, first=0, say=pytest.fail, num_free=lambda _: 2**50) -> RolloutFiles:
    return RolloutFiles(folder, max_gib=max_gib, first=first, journal=heard(say), num_free=num_free)


def test_a_row_has_all_that_is_known_of_a_rollout(tmp_path: Path):
    files = files_in(tmp_path)
    files.put(40, step_rollouts())
    files.close()
    first, second, third = read_rollouts(tmp_path, 40)
    assert first == {
        "step": 40,
        "prompt_index": 11,
        "sample_index": 0,
        "name": "train.parquet:17",
        "data_source": "sums",
        "prompt": "2+2",
        "response": "4",
        "ground_truth": "4",
        "answer": "4",
        "score": 1.0,
        "reward_parts": {"right": 1.0, "short": None},
        "reward_extras": {"acc": 1.0},
        "replaced": False,
        "failure": None,
        "untrained": None,
        "finish_reason": "stop",
        "turns": None,
        "metrics": None,
        "num_tool_calls": None,
        "num_tool_errors": None,
        "environment_s": None,
        "version": 3,
        "prompt_ids": [5, 6],
        "response_ids": [7, 2],
        "loss_mask": [True, True],
        "sequence_starts": None,
        "rollout_logprobs": [-0.5, -0.25],
        "sampled_logprobs": None,
        "token_versions": None,
        "experts": None,
        "turn_states": None,
        "token_rewards": [0.0, 1.0],
        "old_logprobs": None,
        "entropies": [0.25, 1.5],
        "advantages": [0.5, 0.75],
    }
    assert (second["response_ids"], second["loss_mask"]) == ([7, 8, 9, 4], [True, False, False, True])
    assert (second["score"], second["failure"], second["advantages"]) == (None, "timeout: took too long", None)
    assert second["untrained"] == NO_SCORE
    assert (third["finish_reason"], third["version"], third["advantages"]) == ("length", 2, [-0.5])
    assert third["response"] == "?", "half a character is no text"


def whole_step(scores, *, cut=(), mask=(), needs_advantage=True, replaced=()):
    """Return a step of groups with these scores, of which some rows were cut off and some are masked."""
    num, flat = sum(map(len, scores)), torch.tensor([score for group in scores for score in group])
    groups = torch.tensor([at for at, group in enumerate(scores) for _ in group])
    turns = [Trajectory(turns=(turn((5, 6), (7, 2), (-0.5, -0.25), truncated=row in cut),)) for row in range(num)]
    rows = assemble(turns, prompt_index=0, sample_index=list(range(num)), is_narrowed=False)
    rows = dataclasses.replace(rows, prompt_index=groups)
    rewards = torch.zeros(rows.num_tokens).index_add(0, rows.offsets[1:] - 1, flat)
    none = tuple({} for _ in range(num))
    scored = Scored(rows.scored(rewards), tuple(range(num)), (), none, tuple(None for _ in range(num)), Metrics())
    means = torch.stack([flat[groups == group].mean() for group in groups])
    advantages = (flat - means)[rows.row_of_token] * rows.loss_mask
    same = ("offsets", "tokens", "loss_mask", "prompt_index", "sample_index", "rollout_logprobs")
    none_of = {"old_logprobs": None, "reference_logprobs": None}
    learned = ActorBatch(**{name: getattr(rows, name) for name in same}, **none_of, advantages=advantages)
    learned = learned.rows([row for row in range(num) if row not in mask])
    said = {"examples": [example()] * num, "texts": ["4"] * num, "learned": learned}
    found = StepRollouts(rows, scored, **said, needs_advantage=needs_advantage, replaced=frozenset(replaced))
    return found.table(1).column("untrained").to_pylist()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"scores": [[0, 0.5, 0.5, 1]]}, [None, AT_MEAN, AT_MEAN, None]),
        ({"scores": [[1.0, 1.0], [0.0, 1.0]]}, [NO_SIGNAL, NO_SIGNAL, None, None]),
        ({"scores": [[1.0, 1.0], [0.0, 1.0]], "mask": (0, 1)}, [NO_SIGNAL, NO_SIGNAL, None, None]),
        ({"scores": [[1.0, 1.0], [0.0, 0.5]], "needs_advantage": False}, [None] * 4),
        ({"scores": [[0.0, 1.0], [0.0, 1.0]], "cut": (0,), "mask": (0,)}, [TRUNCATED, None, None, None]),
        ({"scores": [[1.0, 1.0], [0.0, 1.0]], "cut": (0,)}, [NO_SIGNAL, NO_SIGNAL, None, None]),
        ({"scores": [[1.0, 1.0], [0.0, 1.0]], "mask": (0, 1), "replaced": (0,)}, [REPLACED, REPLACED, None, None]),
    ],
)
def test_each_row_says_why_nothing_was_learned_from_it(step, expected):
    assert whole_step(**step) == expected


def test_a_validation_has_no_reasons_why_it_was_not_learned_from():
    assert step_rollouts(learned=False).table(1).column("untrained").to_pylist() == [None] * 3


def test_a_step_of_which_no_row_was_learned_has_no_advantages(tmp_path: Path):
    rollouts = step_rollouts()
    assert rollouts.learned is not None
    nothing = dataclasses.replace(rollouts, learned=rollouts.learned.rows([]))
    assert nothing.table(1).column("advantages").to_pylist() == [None, None, None]


def test_what_is_no_rollout_is_told_and_the_next_step_is_written(tmp_path: Path):
    said: list[str] = []
    with contextlib.closing(RolloutFiles(tmp_path, max_gib=1, first=0, journal=heard(said.append))) as files:
        files.put(1, step_rollouts(texts=("4",)))
        files.put(2, step_rollouts())
    assert "step_000001.parquet cannot be written" in said[0]
    assert [file.name for file in (tmp_path / "rollouts").iterdir()] == ["step_000002.parquet"]


def test_the_columns_are_the_same_in_every_file(tmp_path: Path):
    files = files_in(tmp_path)
    files.put(1, step_rollouts())
    files.put(1, step_rollouts(learned=False, examples=[example("a", Message("system", "be brief"))] * 3), "validation")
    files.close()
    trained, validated = (pq.read_schema(rollout_files(tmp_path, kind)[1]) for kind in ("step", "validation"))
    assert trained == validated
    assert read_rollouts(tmp_path, kind="validation")[0]["prompt"] == "system: be brief\nuser: 2+2"


def test_a_resumed_run_leaves_no_step_of_the_future_that_it_gave_up(tmp_path: Path):
    files = files_in(tmp_path)
    for step in (1, 2, 3):
        files.put(step, step_rollouts())
    files.put(3, step_rollouts(), "validation")
    files.close()
    (tmp_path / "rollouts" / "step_000004.part").write_text("torn by a kill")
    (tmp_path / "rollouts" / "mine.txt").write_text("the user's")
    files_in(tmp_path, first=2).close()
    assert sorted(file.name for file in (tmp_path / "rollouts").iterdir()) == [
        "mine.txt",
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    with pytest.raises(RunFolderError, match=r"no step 3; it has 1-2"):
        read_rollouts(tmp_path, 3)


def test_files_take_the_room_that_they_may_and_older_steps_are_thinned_out(tmp_path: Path):
    said: list[str] = []
    files = files_in(tmp_path)
    files.put(0, step_rollouts(), "validation")
    files.close()
    size = rollout_files(tmp_path, "validation")[0].stat().st_size
    files = files_in(tmp_path, max_gib=6.5 * size / GIB, say=said.append)
    for step in range(1, 31):
        files.put(step, step_rollouts())
    files.close()
    kept = list(rollout_files(tmp_path))
    assert len(kept) == 5
    assert kept[-2:] == [29, 30]
    assert kept[0] == 16
    assert 0 in rollout_files(tmp_path, "validation"), "how it began"
    assert said == ["rollouts: older steps are thinned out, since tracking.rollouts_gib is used up"]


def test_no_file_is_written_when_the_disk_has_little_room_or_the_file_has_too_much(tmp_path: Path):
    for max_gib, num_free, why in (
        (1.0, GIB - 1, "less than 1 GiB would be free"),
        (1e-9, 2**50, "larger than tracking.rollouts_gib"),
    ):
        said: list[str] = []
        files = files_in(tmp_path, say=said.append, max_gib=max_gib, num_free=lambda _, free=num_free: free)
        files.put(1, step_rollouts())
        files.put(2, step_rollouts())
        files.close()
        assert list((tmp_path / "rollouts").iterdir()) == []
        assert len(said) == 1
        assert why in said[0]
    files = files_in(tmp_path, max_gib=0)
    files.put(1, step_rollouts())
    files.close()
    assert not rollout_files(tmp_path)


def test_a_file_that_cannot_be_written_is_named_and_the_next_one_is_written(tmp_path: Path):
    said: list[str] = []
    (tmp_path / "rollouts").mkdir()
    files = files_in(tmp_path, say=said.append)
    (tmp_path / "rollouts" / "step_000001.part").symlink_to("/dev/full")
    files.put(1, step_rollouts())
    files.put(2, step_rollouts())
    files.flush()
    assert list(rollout_files(tmp_path)) == [2], "after flush it is there"
    files.close()
    assert "step_000001.parquet cannot be written: No space left on device" in said[0]


def test_a_disk_that_hangs_holds_no_step_and_memory_has_a_bound(tmp_path: Path):
    said: list[str] = []
    go_on, asked = threading.Event(), threading.Event()

    def hang(_folder: Path) -> int:
        asked.set()
        go_on.wait(60)
        return 2**50

    files = files_in(tmp_path, say=said.append, num_free=hang)

    class Large(StepRollouts):
        @property
        def num_bytes(self) -> int:
            return GIB // 2

    small = step_rollouts()
    large = Large(small.rows, small.scored, small.examples, small.texts)
    for step in range(1, 6):
        files.put(step, large)
    assert asked.wait(60)
    files.flush(timeout_s=0.0)
    assert said == [
        "rollouts: step 3 has no file: the disk is slower than the steps",
        "rollouts: the disk has not taken those of the last steps for 0 s",
    ]
    go_on.set()
    files.close()
    assert list(rollout_files(tmp_path)) == [1, 2]
