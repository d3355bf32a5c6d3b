"""What is watched from step to step."""

from types import SimpleNamespace

import pytest

from rallypoint.errors import DivergedError
from rallypoint.journal import Journal, Said, read_journal
from rallypoint.recipes.steps import RemainingSteps


def test_an_update_that_was_left_out_is_said_and_a_third_in_a_row_raised(tmp_path):
    setup = SimpleNamespace(journal=Journal(tmp_path / "journal.jsonl"))
    saver = SimpleNamespace(folder=SimpleNamespace(path=tmp_path))
    steps = RemainingSteps(setup, None, saver, None, None, None, 0.0)
    for step, is_finite in enumerate((False, False, True, False, False), 1):
        steps.newest = {"actor/loss": 1.0} if is_finite else {"actor/not_finite": 1.0, "critic/not_finite": 1.0}
        steps._check_finite(step)
    with pytest.raises(
        DivergedError, match=r"step 6: .*, for the 3rd time in a row: lower actor.optimizer.lr"
    ) as raised:
        steps._check_finite(6)
    assert raised.value.last == 3
    said = [entry.event.text for entry in read_journal(tmp_path / "journal.jsonl") if isinstance(entry.event, Said)]
    assert len(said) == 5
    assert said[0] == (
        "step 1: a loss or gradient of the actor and the critic was not finite; its update was left out "
        f"(rally replay {tmp_path} --step 1 computes it again)"
    )
