"""Which ranks meet along which axis, and what gradients become on their way between ranks."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.parallel import DeviceMesh, gather_rows, reduce, replicate, share_rows, sum_rows


def sum_of_ranks(group, mesh):
    total = torch.tensor(1 << mesh.rank)
    group.all_reduce_sum([total])
    return total.item()


def test_a_mesh_of_one_rank_needs_no_place_to_meet():
    mesh = DeviceMesh.connect(None, "actor", 0, {"tp": 1})
    assert mesh.rank == 0
    assert {group.size for group in (mesh.everyone, mesh.replicas, mesh.shard, mesh.sp, mesh.tp)} == {1}


def test_an_axis_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="axes dp_replicate, dp_shard, ep, cp, sp, tp, not dp"):
        DeviceMesh.connect(None, "actor", 0, {"dp": 2})


def test_every_axis_joins_the_ranks_that_differ_on_it_only(on_mesh):
    def call(mesh):
        groups = (mesh.everyone, mesh.replicas, mesh.shard, mesh.sp, mesh.tp)
        return mesh.coordinates, [sum_of_ranks(group, mesh) for group in groups]

    found = on_mesh(call, dp_replicate=2, sp=2, tp=2)
    assert [coordinates["tp"] for coordinates, _ in found] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert found[0][1] == [0b11111111, 0b01010101, 0b1, 0b101, 0b11]
    assert found[7][1] == [0b11111111, 0b10101010, 0b10000000, 0b10100000, 0b11000000]


def test_ranks_that_share_experts_have_the_same_other_weights_and_make_their_passes_together(on_mesh):
    def call(mesh):
        groups = (mesh.replicas, mesh.expert_replicas, mesh.passes, mesh.ep)
        return [sum_of_ranks(group, mesh) for group in groups]

    found = on_mesh(call, dp_replicate=2, ep=2, sp=2)
    assert found[0] == [0b11111111, 0b110011, 0b101, 0b101]
    assert found[7] == [0b11111111, 0b11001100, 0b10100000, 0b10100000]


def test_ranks_that_share_tokens_are_those_along_two_axes(on_mesh):
    def call(mesh):
        return [sum_of_ranks(group, mesh) for group in (mesh.tokens, mesh.cp, mesh.sp, mesh.replicas, mesh.passes)]

    found = on_mesh(call, dp_replicate=2, cp=2, sp=2)
    assert found[0] == [0b1111, 0b101, 0b11, 0b11111111, 0b1]
    assert found[7] == [0b11110000, 0b10100000, 0b11000000, 0b11111111, 0b10000000]


@pytest.mark.parametrize("sizes", [[3, 2], [5, 0]], ids=str)
def test_shared_rows_and_their_sums_are_the_other_s_backward_pass(on_mesh, sizes):
    rows = torch.arange(10.0).view(5, 2)
    terms = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(0))  # of each rank

    def call(mesh):
        mine = rows.split(sizes)[mesh.ep.rank].clone().requires_grad_()
        shared = share_rows(mine, mesh.ep, sizes)
        sums = sum_rows(shared * terms[mesh.ep.rank], mesh.ep, sizes)
        sums.square().sum().backward()
        return shared, sums, mine.grad

    total = terms.sum(0)
    for rank, (shared, sums, grad) in enumerate(on_mesh(call, ep=2)):
        own = [part.split(sizes)[rank] for part in (rows, total)]
        assert torch.equal(shared, rows)
        torch.testing.assert_close(sums, own[0] * own[1])
        torch.testing.assert_close(grad, 2 * own[0] * own[1].square())


def test_a_group_that_two_axes_share_is_met_once(on_mesh):
    for mesh in on_mesh(lambda mesh: mesh, tp=2):
        assert mesh.everyone is mesh.tp
        assert mesh.shard.size == mesh.sp.size == 1


def test_ranks_that_start_again_do_not_wait_for_the_leases_of_those_that_are_gone():
    with open_rendezvous("memory", "test") as rendezvous, ThreadPoolExecutor(2) as threads:

        def met(start):
            connect = functools.partial(DeviceMesh.connect, rendezvous, "actor", sizes={"tp": 2}, timeout_s=60)
            return list(threads.map(lambda rank: connect(rank, generation=start), range(2)))

        gone = met(7)  # killed, so nobody leaves its seat
        assert list(threads.map(lambda mesh: sum_of_ranks(mesh.tp, mesh), met(9))) == [3, 3]
        del gone


def test_a_linear_layer_in_two_halves_has_the_gradients_of_the_whole(on_mesh):
    generator = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(shape, generator=generator).double() for shape in ((5, 4), (6, 4), (4, 6)))

    def whole():
        tensors = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
        out = (tensors[0] @ tensors[1].T).relu() @ tensors[2].T
        out.square().sum().backward()
        return out, *(tensor.grad for tensor in tensors)

    def half(mesh):
        mine = slice(3 * mesh.tp.rank, 3 * mesh.tp.rank + 3)
        tensors = [tensor.clone().requires_grad_() for tensor in (x, up[mine], down[:, mine])]
        out = reduce((replicate(tensors[0], mesh.tp) @ tensors[1].T).relu() @ tensors[2].T, mesh.tp)
        out.square().sum().backward()
        return out, *(tensor.grad for tensor in tensors)

    out, grad_x, grad_up, grad_down = whole()
    for rank, got in enumerate(on_mesh(half, tp=2)):
        mine = slice(3 * rank, 3 * rank + 3)
        for actual, expected in zip(got, (out, grad_x, grad_up[mine], grad_down[:, mine]), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [[3, 2], [5, 0]], ids=str)
def test_gathered_rows_have_the_gradient_of_their_own_slice(on_mesh, sizes):
    rows = torch.arange(10.0).view(5, 2)
    weights = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))

    def call(mesh):
        mine = rows.split(sizes)[mesh.sp.rank].clone().requires_grad_()
        joined = gather_rows(mine, mesh.sp, sizes)
        (joined * weights).sum().backward()
        return joined, mine.grad

    for rank, (joined, grad) in enumerate(on_mesh(call, sp=2)):
        assert torch.equal(joined, rows)
        assert torch.equal(grad, weights.split(sizes)[rank])
