"""The pretend device itself: the bits of the CPU, and the walls that a GPU has."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

CPU, DEVICE = torch.device("cpu"), torch.device("pretend:0")


def trained(device):
    """Return what a small network is after three steps on a device."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
    for weight in network.parameters():
        nn.init.normal_(weight, generator=generator)
    network, inputs = network.to(device), torch.randn(4, 8, generator=generator).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()
    return [weight.detach().cpu() for weight in network.parameters()]


def test_it_is_the_accelerator_and_there_are_several():
    assert torch.accelerator.current_accelerator(check_available=True).type == "pretend"
    assert torch.accelerator.device_count() == 2
    assert str(torch.ones(2, device="pretend:1").device) == "pretend:1"


def test_training_has_the_bits_of_the_cpu():
    assert all(map(torch.equal, trained(CPU), trained(DEVICE)))


def test_attention_has_the_bits_of_the_cpu_and_names_the_kernel_of_a_gpu(pretend):
    def attended(device, dtype, **options):
        generator = torch.Generator().manual_seed(0)
        query, key = (torch.randn(2, heads, 6, 8, generator=generator).to(device, dtype) for heads in (4, 2))
        query.requires_grad_()
        out = functional.scaled_dot_product_attention(query, key, key, enable_gqa=True, **options)
        out.sum().backward()
        return out.detach().cpu(), query.grad.cpu()

    for dtype, kernel in ((torch.float32, "math"), (torch.bfloat16, "flash")):
        expected = attended(CPU, dtype, is_causal=True)
        assert all(map(torch.equal, attended(DEVICE, dtype, is_causal=True), expected))
        assert pretend.kernels[f"attention by {kernel}"] == 1


def test_an_operator_does_not_mix_devices_but_takes_numbers_of_the_cpu():
    there = torch.ones(3, device=DEVICE)
    for other in (torch.ones(3), torch.ones(3, device="pretend:1")):
        with pytest.raises(RuntimeError, match="on the same device"):
            there + other
        with pytest.raises(RuntimeError, match="on the same device"):
            torch.stack([there, other])
    assert (there + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]
    assert (2 - there).tolist() == [1.0, 1.0, 1.0]


def test_views_share_memory_and_writes_are_seen():
    whole = torch.zeros(4, 3, device=DEVICE)
    whole.view(-1)[3:6].fill_(1)
    whole[:, 2] += 2
    assert whole.tolist() == [[0, 0, 2], [1, 1, 3], [0, 0, 2], [0, 0, 2]]
    assert whole[1:].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert whole[1:].data_ptr() == whole.data_ptr() + 12


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda there: there[0].item(), "item"),
        (lambda there: there.tolist(), "copy to the host"),
        (lambda there: there.cpu(), "copy to the host"),
        (lambda there: there.nonzero(), "nonzero"),
        (lambda there: there[there > 0], "nonzero"),
        (lambda there: bool(there.sum() > 1), "item"),
        (lambda there: torch.equal(there, there + 1), "equal"),
        (lambda there: torch.ones(3, device=DEVICE).copy_(torch.zeros(3)), "copy to the device"),
        (lambda there: torch.tensor([1.0, 2.0], device=DEVICE), "copy to the device"),
    ],
)
def test_whatever_has_the_host_wait_is_counted(pretend, ask, reason):
    there = torch.ones(3, device=DEVICE)
    pretend.reset()
    ask(there)
    assert pretend.syncs == {reason: 1}


def test_what_the_host_does_not_wait_for_is_not_counted(pretend):
    there = torch.ones(3, 3, device=DEVICE)
    pretend.reset()
    (there @ there).softmax(-1).masked_fill_(there > 0, 0.0).index_select(0, torch.arange(3, device=DEVICE))
    torch.zeros(3, pin_memory=True).to(DEVICE, non_blocking=True)
    assert not pretend.syncs
    assert pretend.copies == {"to the device": 1}
    assert pretend.bytes == {"to the device": 12}


def test_a_copy_to_page_locked_memory_arrives_when_the_device_was_waited_for():
    there, here = torch.ones(3, device=DEVICE), torch.empty(3, pin_memory=True)
    here.copy_(there, non_blocking=True)
    assert here.isnan().all()
    torch.accelerator.synchronize()
    assert here.tolist() == [1, 1, 1]


def test_page_locked_memory_is_not_to_be_written_while_it_is_copied(pretend):
    here = torch.zeros(3, pin_memory=True)
    there = here.to(DEVICE, non_blocking=True)
    here += 1
    there.cpu()
    with pytest.raises(AssertionError, match="page-locked memory was written while a copy from it was under way"):
        pretend.check()


def test_a_stream_copies_to_page_locked_memory_after_it_has_copied_from_it(pretend):
    here = torch.zeros(3, pin_memory=True)
    there = here.to(DEVICE, non_blocking=True) + 1
    here.copy_(there, non_blocking=True)
    torch.accelerator.synchronize()
    assert here.tolist() == [1, 1, 1]
    pretend.check()


def test_memory_is_counted_limited_and_given_back(pretend):
    gc.collect()
    pretend.reset()
    before = pretend.allocated()
    there = torch.ones(1000, device=DEVICE)
    view = there[:10]
    assert torch.accelerator.memory_allocated() - before == 4000
    torch.zeros(500, device=DEVICE)
    assert torch.accelerator.max_memory_allocated() - before == 6000
    with pretend.limited(before + 5000), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1200 bytes"):
        torch.ones(300, device=DEVICE)
    del there
    assert pretend.allocated() - before == 4000
    del view
    assert pretend.allocated() == before


def test_what_comes_back_of_a_storage_that_was_freed_is_wrong(pretend):
    there = torch.ones(3, device=DEVICE)
    before, storage = pretend.allocated(), there.untyped_storage()
    storage.resize_(0)
    assert pretend.allocated() == before - 12
    storage.resize_(12)
    assert pretend.allocated() == before
    assert there.isnan().all()


def test_streams_wait_for_each_other(pretend):
    there, side = torch.ones(3, device=DEVICE), torch.Stream(DEVICE)
    with side, pytest.raises(RuntimeError, match="has not waited"):
        there + 1
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        made = there + 1
        ready = side.record_event()
    with pytest.raises(RuntimeError, match="has not waited"):
        made + 1
    torch.accelerator.current_stream().wait_event(ready)
    assert (made + 1).tolist() == [3, 3, 3]


def test_memory_that_a_stream_uses_is_not_freed_under_it(pretend):
    side = torch.Stream(DEVICE)
    for is_recorded in (True, False):
        there = torch.ones(3, device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            there + 1
        if is_recorded:
            there.record_stream(side)
        del there
    assert len(pretend.faults) == 1
    with pytest.raises(AssertionError, match="record_stream, or wait"):
        pretend.check()
