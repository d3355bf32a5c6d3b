"""Weights on the pretend device: by device memory, through the host's where there is none to share, and by a folder."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_ipc import Driver
from tiny_models import make_tiny_model

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.model_files import load_policy
from rallypoint.models import Part
from rallypoint.weights import (
    HEADER_BYTES,
    Held,
    Manifest,
    Participant,
    Receiver,
    Sender,
    TransferPlan,
    buffers,
    digested,
    published_folder,
    same_node,
)
from rallypoint.weights.checksums import sums

DEVICE = torch.device("pretend:0")
WHOLE = {
    "matrix": torch.randn(48, 32, generator=torch.Generator().manual_seed(0)),
    "rounded": torch.randn(2, 700, generator=torch.Generator().manual_seed(1)),
    "number": torch.tensor(3.5),
}
TYPES = {"matrix": torch.float32, "rounded": torch.bfloat16, "number": torch.float32}
"""In which they are published: masters of one tensor are wider."""


def published(driver, versions=(1, 2)):
    """Two ranks of an actor hold halves; both sample, and so does a third process. Return the plan, and all models."""
    parts = [{name: Part.whole(tensor.shape) for name, tensor in WHOLE.items()} for _ in range(2)]
    for rank, mine in enumerate(parts):
        mine["matrix"] = mine["matrix"].cut(0, rank, 2)
    held = [{name: Held(TYPES[name], part) for name, part in mine.items()} for mine in parts]
    manifest = Manifest.of(held, bucket_bytes=HEADER_BYTES + 2048, checksum="sums")
    plan = TransferPlan("weights", (Participant(0, 0), Participant(1, 1), Participant(None, 2)), manifest, 60.0)
    models = [
        {name: torch.zeros(t.shape, dtype=TYPES[name], device=DEVICE) for name, t in WHOLE.items()} for _ in "abc"
    ]

    def run(place):
        line = same_node.join(
            rendezvous, plan, place, buffers=(buffers.DeviceMemory(DEVICE, driver.process(place)), buffers.HostMemory())
        )
        for version in versions:
            source = None
            if place < 2:
                whole = {name: Part.whole(tensor.shape) for name, tensor in WHOLE.items()}
                own = {name: WHOLE[name][part.within(whole[name])] for name, part in parts[place].items()}
                source = Sender({name: (tensor * version).to(DEVICE) for name, tensor in own.items()})
            sink = Receiver(manifest, models[place], version)
            line.run(version, source, sink, lambda: None)
            sink.finish()
        line.close()

    with open_rendezvous("memory", "pretend", lease_s=10) as rendezvous, ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    for model in models:
        for name, tensor in model.items():
            assert torch.equal(tensor.cpu(), (WHOLE[name] * versions[-1]).to(TYPES[name]))
    return plan


def test_weights_arrive_through_memory_of_the_device_and_nothing_of_them_through_the_host(pretend):
    driver = Driver()
    published(driver)
    assert len(driver.opened) == 2 + 2
    compared = 3 * sum(tensor.numel() * TYPES[name].itemsize for name, tensor in WHOLE.items())
    assert pretend.bytes["to the host"] < compared + 1024  # what each bucket says of itself


def test_the_host_waits_for_no_checksum_but_once_for_all(pretend):
    tensors = {name: tensor.to(DEVICE, TYPES[name]) for name, tensor in WHOLE.items()}
    whole = {name: Held(TYPES[name], Part.whole(tensor.shape)) for name, tensor in tensors.items()}
    manifest = Manifest.of([whole], bucket_bytes=HEADER_BYTES + 2048, checksum="sums")
    source, sink = Sender(tensors), Receiver(manifest, {n: torch.zeros_like(t) for n, t in tensors.items()}, 1)
    bucket = torch.zeros(manifest.bucket_bytes, dtype=torch.uint8, device=DEVICE)
    pretend.reset()
    assert len(manifest.buckets) > 3
    for index in range(len(manifest.buckets)):
        source.pack(manifest, index, 1, bucket)
        sink.unpack(index, bucket)
    assert not pretend.syncs
    sink.finish()
    assert sum(pretend.syncs.values()) == 1
    pretend.reset()
    digested(tensors)
    assert sum(pretend.syncs.values()) == 1


@pytest.mark.parametrize("driver", [Driver(cut_off=(2,)), Driver(exports=False)], ids=["no peer access", "no handles"])
def test_weights_arrive_through_the_host_where_devices_share_no_memory(driver, caplog):
    with caplog.at_level(logging.WARNING):
        published(driver)
    assert sum("go through the host's memory instead of the device's" in line for line in caplog.messages) == 2


def test_a_folder_that_one_device_has_written_is_read_by_another(tmp_path):
    path = make_tiny_model(tmp_path / "model")
    actor, taker = (
        load_policy(path, dtype="float32", device=torch.device(NAME)) for NAME in ("pretend:0", "pretend:1")
    )
    with torch.no_grad():
        for tensor in actor.trained().values():
            tensor.mul_(3.0)
    published_folder.read(taker, published_folder.write(actor, tmp_path / "published", 5, base=path), 5)
    found = taker.trained()
    assert all(torch.equal(found[name].cpu(), tensor.cpu()) for name, tensor in actor.trained().items())


def test_sums_and_digests_are_those_of_every_device():
    for num_bytes in (0, 3, 4096, 9002):
        data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        assert torch.equal(sums(data), sums(data.to(DEVICE)).cpu())
    there, other = ({name: tensor.to(device) for name, tensor in WHOLE.items()} for device in (DEVICE, "pretend:1"))
    assert digested(there) == digested(other)
    other["matrix"][0, 0] += 1
    assert digested(there) != digested(other)
