"""What the endpoint of a run tells Prometheus."""

from rallypoint.journal import Journal, StepDone, Validated
from rallypoint.recipes.endpoint import Endpoint
from rallypoint.run.folder import RunFolder


def test_a_run_s_newest_numbers_are_told_with_those_of_its_newest_validation(tmp_path):
    folder = RunFolder(tmp_path / "first")
    folder.path.mkdir()
    with Journal(folder.journal) as journal:
        endpoint = Endpoint(0, folder, journal)
        journal.append(StepDone(step=1, metrics={"reward/mean": 0.25}, digests={}))
        journal.append(Validated(step=1, metrics={"validation/score": 0.75}))
        journal.append(StepDone(step=2, metrics={"reward/mean": 0.5}, digests={}))
        told = endpoint.measured().splitlines()
        endpoint._socket.close()
    assert 'rallypoint_step{run="first"} 2' in told
    assert 'rallypoint_reward_mean{run="first",name="reward/mean"} 0.5' in told
    assert 'rallypoint_validation_score{run="first",name="validation/score"} 0.75' in told
