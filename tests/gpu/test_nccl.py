"""NCCL over a rendezvous: a process group, and a raw communicator."""

import pytest
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.parallel import Grouped, meet
from rallypoint.parallel.nccl import NcclCommunicator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def rendezvous():
    with open_rendezvous("memory", "these tests") as rendezvous:
        yield rendezvous


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_raw_communicator_sums_and_broadcasts(rendezvous, dtype):
    with NcclCommunicator.meet(rendezvous, "weights", rank=0, world_size=1, timeout_s=60) as nccl:
        tensor = torch.arange(5, device="cuda").to(dtype)
        nccl.all_reduce_sum(tensor)
        nccl.broadcast(tensor, root=0)
        assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_a_raw_communicator_refuses_what_it_would_read_wrongly(rendezvous):
    with NcclCommunicator.meet(rendezvous, "weights", rank=0, world_size=1, timeout_s=60) as nccl:
        with pytest.raises(ValueError, match="strided"):
            nccl.all_reduce_sum(torch.zeros(4, 4, device="cuda").T)
        with pytest.raises(ValueError, match="on cpu"):
            nccl.all_reduce_sum(torch.zeros(4))


def test_a_process_group_on_a_gpu_sums(rendezvous):
    with meet(rendezvous, "actor", rank=0, world_size=1, timeout_s=60, device="cuda") as group:
        tensor = torch.ones(3, device="cuda")
        torch.distributed.all_reduce(tensor, group=group.torch_group)
        assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_what_lies_on_a_cpu_goes_through_a_group_of_gpus_and_comes_back(rendezvous):
    with meet(rendezvous, "actor", rank=0, world_size=1, timeout_s=60, device="cuda") as group:
        ranks, part = Grouped(group), torch.tensor([3, 4])
        (gathered,), (given,) = ranks.all_gather(part, [2]), ranks.exchange([part], [2])
        assert gathered.tolist() == given.tolist() == [3, 4]
        assert gathered.device == given.device == part.device
