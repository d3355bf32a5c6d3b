"""What Ray's errors about a lost process become."""

import dataclasses

from ray.exceptions import RayActorError

from rallypoint.cluster.process import Invocation, ProcessInfo
from rallypoint.cluster.ray_process import LostNode, RayPending
from rallypoint.errors import RayLostError, WorkerDiedError


@dataclasses.dataclass
class Runtime:
    """Knows no process by its Ray actor, and whether a node was lost."""

    lost: LostNode | None = None

    def process_of(self, actor_id):
        return None

    def node_lost(self, where, told):
        return self.lost


@dataclasses.dataclass
class Process:
    runtime: Runtime
    info: ProcessInfo = ProcessInfo("b", "id of b", 7)
    ended: bool = False
    hung: None = None


def error_of(runtime, **said):
    pending = RayPending(Invocation(1, "rollout", 1, "advance", True, 3), Process(runtime), None)
    return pending.error(RayActorError("a1", "it was killed. Some common causes include: many", **said))


def test_a_killed_process_is_named_without_advice():
    error = error_of(Runtime())
    assert type(error) is WorkerDiedError
    assert str(error) == "rollout rank 1 (pid 7, node b) died during advance at step 3: it was killed."
    assert not error.is_preempted


def test_a_process_whose_node_was_preempted_says_so():
    assert error_of(Runtime(), preempted=True).is_preempted


def test_a_process_that_was_sent_sigterm_says_so():
    pending = RayPending(Invocation(1, "rollout", 1, "advance", True, 3), Process(Runtime()), None)
    error = pending.error(RayActorError("a1", "Worker exit detail: The process receives a SIGTERM."))
    assert (error.is_terminated, error.is_preempted) == (True, False)
    assert not error_of(Runtime()).is_terminated


def test_a_process_of_another_node_that_was_lost_is_a_loss_after_which_a_run_goes_on():
    error = error_of(
        Runtime(LostNode("Ray has lost node b of the cluster: no heartbeat", is_ours=False)), preempted=True
    )
    assert type(error) is WorkerDiedError
    assert str(error).endswith("died during advance at step 3: Ray has lost node b of the cluster: no heartbeat")
    assert (error.is_node_lost, error.is_preempted) == (True, True)


def test_a_lost_node_of_our_own_is_named_and_no_worker_blamed():
    error = error_of(Runtime(LostNode("Ray's raylet was killed", is_ours=True)))
    assert type(error) is RayLostError
    assert "Ray's raylet was killed; the workers of node b ended with it, during rollout.advance at step 3" in str(
        error
    )
