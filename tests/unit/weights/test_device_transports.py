"""Weights through memory of devices, where every rank of the actor samples too: by the rules of CUDA's handles."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_ipc import Driver
from tiny_models import make_tiny_model

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.config import load_config
from rallypoint.errors import WeightsMismatchError
from rallypoint.model_files import load_policy
from rallypoint.models import trained_weights
from rallypoint.roles.publishing import Stream, make_plan
from rallypoint.transport_kinds import IPC
from rallypoint.weights import Held, Receiver, Sender, same_node
from rallypoint.weights.buffers import DeviceMemory, HostMemory

DEVICE = torch.device("cpu")


class OnHost(DeviceMemory):
    """Memory of a device that is none, and has nothing to wait for."""

    def settle(self):
        pass


class Colocated:
    """Actor and rollout role in the same processes, which are threads, a device each."""

    def __init__(self, rendezvous, driver, actor, make_model, *, num_rollout=None):
        self.actor = actor
        config = load_config("digits", ["cluster.device=cuda"]).config
        processes = [object() for _ in range(max(len(actor), num_rollout or 0))]
        held = [
            {name: Held(shard.sharding.half or tensor.dtype, shard.parts[name]) for name, tensor in own.items()}
            for shard, own in actor
        ]
        stream = Stream.of(IPC, config)
        self.plan = make_plan(stream, held, processes[: len(actor)], processes[: num_rollout or len(actor)])
        self.models = {place: make_model() for place in self.plan.receivers}
        self.lines = self.each(
            lambda place: same_node.join(
                rendezvous,
                self.plan,
                place,
                buffers=(OnHost(DEVICE, driver.process(place)), HostMemory()),
            )
        )

    def each(self, do):
        with ThreadPoolExecutor(len(self.plan.members)) as pool:
            return list(pool.map(do, range(len(self.plan.members))))

    def publish(self, version):
        def run(place):
            member = self.plan.members[place]
            source = None if member.sender is None else Sender(self.actor[member.sender][1])
            sink = None
            if member.receiver is not None:
                sink = Receiver(self.plan.manifest, trained_weights(self.models[place]), version)
            self.lines[place].run(version, source, sink, lambda: None)
            if sink is not None:
                sink.finish()

        self.each(run)

    def close(self):
        for line in self.lines:
            line.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3")


@pytest.fixture
def colocated(on_mesh, folder):
    """Return a function that makes processes of an actor that is cut in some way."""
    until = []
    with open_rendezvous("memory", "devices", lease_s=10) as rendezvous:

        def make(driver, *, dtype="float32", num_rollout=None, **sizes):
            def load(mesh):
                shard = load_policy(folder, dtype=dtype, mesh=mesh)
                return shard, {name: tensor.detach().clone() for name, tensor in shard.trained().items()}

            made = Colocated(
                rendezvous,
                driver,
                on_mesh(load, **sizes),
                lambda: load_policy(folder, dtype=dtype, seed=7).model,
                num_rollout=num_rollout,
            )
            until.append(made)
            return made

        yield make
        for one in until:
            one.close()


def assert_published(company, folder, dtype="float32"):
    """Two versions, of which the second is another one's numbers."""
    whole = {name: weight.detach() for name, weight in trained_weights(load_policy(folder, dtype=dtype).model).items()}
    for version, factor in ((1, 1.0), (2, -2.0)):
        company.publish(version)
        for model in company.models.values():
            found = trained_weights(model)
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[name], weight * factor) for name, weight in whole.items())
        for _, own in company.actor:
            for tensor in own.values():
                tensor.mul_(-2.0)


CUTS = [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_an_actor_that_is_cut_publishes_to_the_rollout_role_of_its_own_processes(colocated, folder, sizes, dtype):
    driver = Driver()
    company = colocated(driver, dtype=dtype, **sizes)
    assert_published(company, folder, dtype)
    num = len(company.plan.members)
    assert len(driver.opened) == len(driver.exported) == num * (num - 1)  # a handle for each taker, none for oneself


def test_more_rollout_ranks_than_ranks_of_the_actor_and_fewer_take_all_of_it(colocated, folder):
    for num_rollout in (1, 3):
        assert_published(colocated(Driver(), dp_shard=2, num_rollout=num_rollout), folder)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_a_device_that_reaches_no_other_one_takes_and_sends_through_the_host_and_the_log_says_so(
    colocated, folder, sizes, caplog
):
    driver = Driver(cut_off=(1,))
    with caplog.at_level(logging.WARNING):
        company = colocated(driver, **sizes)
    assert_published(company, folder)
    num = len(company.plan.members)
    assert len(caplog.messages) == num  # each has process 1 among its takers, or is it
    assert any(
        "weights of actor rank 0 and rollout rank 0 go through the host's memory instead of the device's: actor rank 1 "
        "and rollout rank 1 cannot open it (CUDA error: peer access is not supported" in line
        for line in caplog.messages
    )


def test_where_no_memory_has_a_handle_all_goes_through_the_host(colocated, folder, caplog):
    with caplog.at_level(logging.WARNING):
        company = colocated(Driver(exports=False), dp_shard=2)
    assert_published(company, folder)
    assert sum("it cannot be shared (CUDA error: operation not supported)" in line for line in caplog.messages) == 2


class Elsewhere:
    """Handles that open other memory than the one that was meant."""

    def __init__(self, inner):
        self.inner = inner

    def export(self, memory):
        return self.inner.export(memory)

    def open(self, handle, device):
        return torch.zeros_like(self.inner.open(handle, device))


def test_other_memory_than_the_one_that_was_meant_is_not_used():
    driver = Driver()
    made, (handle,) = OnHost(DEVICE, driver.process(0)).make(1024, 1)
    assert OnHost(DEVICE, driver.process(1)).open(1024, handle).data_ptr() == made.data_ptr()
    made, (handle,) = OnHost(DEVICE, driver.process(0)).make(1024, 1)
    with pytest.raises(RuntimeError, match="other memory"):
        OnHost(DEVICE, Elsewhere(driver.process(1))).open(1024, handle)


class Damaging:
    """A source that flips a bit of a bucket after its sums were taken."""

    def __init__(self, inner):
        self.inner = inner

    def pack(self, manifest, index, version, memory):
        self.inner.pack(manifest, index, version, memory)
        memory[manifest.buckets[index].rectangles[1].start + 3] ^= 16

    def part(self, rectangle):
        return self.inner.part(rectangle)

    def run(self, rectangle):
        return self.inner.run(rectangle)


def test_a_bit_that_flips_on_its_way_is_found_in_the_end_and_named(colocated):
    company = colocated(Driver(), dp_shard=2)
    manifest = company.plan.manifest
    assert manifest.checksum == "sums"
    lost = manifest.buckets[0].rectangles[1].name
    bucket = torch.zeros(manifest.bucket_bytes, dtype=torch.uint8)
    for make, message in (
        (Damaging, f"version 1 was not loaded: {lost} was damaged on its way"),
        (lambda source: source, "buckets did not come"),
    ):
        make(Sender(company.actor[0][1])).pack(manifest, 0, 1, bucket)
        sink = Receiver(manifest, trained_weights(company.models[0]), 1)
        sink.unpack(0, bucket)
        with pytest.raises(WeightsMismatchError, match=message):
            sink.finish()
    sink = Receiver(manifest, trained_weights(company.models[0]), 2)
    sink.unpack(0, bucket)
    with pytest.raises(WeightsMismatchError, match="expected bucket 0 of version 2, found bucket 0 of 1"):
        sink.finish()
