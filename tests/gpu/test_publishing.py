"""Weights through device memory that two processes share."""

import multiprocessing

import pytest
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.model_files.pieces import same_names
from rallypoint.models import Part
from rallypoint.transport_kinds import IPC
from rallypoint.weights import (
    HEADER_BYTES,
    Held,
    Manifest,
    Participant,
    Receiver,
    Sender,
    TransferPlan,
    join,
    same_node,
)
from rallypoint.weights.served import Invitation, ServerReceiver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]

SHAPE = (300, 1000)


def take(rendezvous, plan, device, into):
    line = join(IPC, rendezvous, plan, 1, device=device)
    for version in (1, 2):
        model = {"w": torch.zeros(SHAPE, dtype=torch.bfloat16, device=device)}
        sink = Receiver(plan.manifest, model, version)
        line.run(version, None, sink, lambda: None)
        sink.finish()
        into.put(float(model["w"].float().sum()))
    line.close()


def take_as_server(rendezvous, plan, device, into):
    """What a worker of a server does, with the invitation that its rank has for it."""
    pieces = {"w": same_names("w", SHAPE)}
    told = Invitation(IPC, plan, [1], same_node.meet_members(rendezvous, plan, 1), pieces).text()
    own = torch.device(device, torch.accelerator.current_device_index())
    receiver = ServerReceiver(Invitation.read(told), 0, own)
    for version in (1, 2):
        [(name, tensor)] = receiver.tensors(version)
        assert (name, tensor.device, tensor.dtype) == ("w", own, torch.bfloat16)
        into.put(float(tensor.float().sum()))
    receiver.close()


@pytest.mark.parametrize(
    ("take", "members"),
    [
        (take, (Participant(0, None), Participant(None, 0))),
        (take_as_server, (Participant(0, 0), Participant(None, 0, worker=0))),
    ],
    ids=["model", "server"],
)
def test_weights_arrive_in_another_process_through_device_memory(take, members):
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert accelerator is not None
    held = {"w": Held(torch.bfloat16, Part.whole(SHAPE))}
    manifest = Manifest.of([held], bucket_bytes=HEADER_BYTES + 2**16, checksum="sums")
    plan, context = (
        TransferPlan("weights", members, manifest, 60.0),
        multiprocessing.get_context("spawn"),
    )
    with open_rendezvous("tcp", "these tests") as rendezvous:
        into = context.Queue()
        taker = context.Process(target=take, args=(rendezvous, plan, accelerator.type, into))
        taker.start()
        line = join(IPC, rendezvous, plan, 0, device=accelerator.type)
        for version in (1, 2):
            masters = torch.full(SHAPE, float(version), device=accelerator)
            line.run(version, Sender({"w": masters}), None, lambda: None)
            assert into.get(timeout=60) == version * masters.numel()
        line.close()
        taker.join()
