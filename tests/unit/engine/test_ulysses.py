"""Ranks that share the tokens of a stream compute what one rank computes alone: outputs, and gradients in sum."""

import copy
import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from rallypoint.engine import critic_values, policy_outputs
from rallypoint.engine.forward import trained_positions
from rallypoint.models import ATTENTION, ModelShard, TokenSlice
from rallypoint.models.norm import replace_norms
from rallypoint.parallel import Collective, DeviceMesh

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def make_model(kind=LlamaForCausalLM, dtype=torch.float64, num_key_value_heads=3):
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=num_key_value_heads,
        head_dim=2,
        intermediate_size=16,
        initializer_range=0.3,
        num_labels=1,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(0)
    model = kind(config).eval().to(dtype)
    replace_norms(model)  # transformers' own round to float32, also what several rows share
    return model


def step(model, batch, mesh):
    """(logprobs, entropies, gradients) of a loss of both; a rank has its share of the gradients."""
    model = copy.deepcopy(model)
    at = trained_positions(batch)
    outputs = policy_outputs(ModelShard.whole(model, mesh), batch, at, 0.7)
    (outputs.logprobs.exp() * batch.advantages[at] + 0.1 * outputs.entropy).sum().backward()
    return [outputs.logprobs, outputs.entropy], gradients_of(model)


def gradients_of(model):
    return {name: weight.grad for name, weight in model.named_parameters()}


def assert_equal(found, expected, dtype):
    outputs, gradients = expected
    for got, _ in found:
        for actual, wanted in zip(got, outputs, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        assert all(torch.equal(actual, same) for actual, same in zip(got, found[0][0], strict=True))
    for name, wanted in gradients.items():
        total = sum(rank[name] for _, rank in found)
        assert (total - wanted).abs().max() <= TOLERANCES[dtype] * wanted.abs().max(), name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "sizes", [{"sp": 2}, {"sp": 3}, {"sp": 4}, {"cp": 2}, {"cp": 5}, {"cp": 2, "sp": 3}, {"cp": 3, "sp": 2}], ids=str
)
def test_any_number_of_ranks_has_the_outputs_and_gradients_of_one(on_mesh, make_batch, sizes, dtype):
    model, batch = make_model(dtype=dtype), make_batch([6, 1, 13, 0, 30, 2, 7])
    found = on_mesh(lambda mesh: step(model, batch, mesh), **sizes)
    assert_equal(found, step(model, batch, DeviceMesh.solo()), dtype)


@pytest.mark.parametrize("num_key_value_heads", [12, 6, 4, 2, 1])
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_key_value_heads_may_be_fewer_than_ranks_and_need_not_divide_by_them(
    on_mesh, make_batch, num_ranks, num_key_value_heads
):
    model, batch = make_model(num_key_value_heads=num_key_value_heads), make_batch([5, 8, 3])
    found = on_mesh(lambda mesh: step(model, batch, mesh), sp=num_ranks)
    assert_equal(found, step(model, batch, DeviceMesh.solo()), torch.float64)


@pytest.mark.parametrize("sizes", [{"sp": 4}, {"cp": 4}, {"cp": 2, "sp": 2}], ids=str)
@pytest.mark.parametrize("lengths", [[2], [3, 2], [700, 5]], ids=str)
def test_tokens_may_be_fewer_than_ranks_and_a_row_may_lie_on_all_ranks(on_mesh, make_batch, lengths, sizes):
    model, batch = make_model(), make_batch(lengths, seed=2)
    assert batch.num_loss_tokens
    found = on_mesh(lambda mesh: step(model, batch, mesh), **sizes)
    assert_equal(found, step(model, batch, DeviceMesh.solo()), torch.float64)


@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_what_rows_of_a_group_begin_with_is_computed_once_by_one_of_the_ranks(on_mesh, make_batch, axis):
    model, batch = make_model(), make_batch([9, 12, 7, 7])
    for first, second, num_shared in ((0, 1, 6), (2, 3, 4)):
        start, copy_start = int(batch.offsets[first]), int(batch.offsets[second])
        batch.tokens[copy_start : copy_start + num_shared] = batch.tokens[start : start + num_shared]
        batch.tokens[copy_start + num_shared] = (batch.tokens[start + num_shared] + 1) % 20

    def call(mesh):
        rank_model, seen = copy.deepcopy(model), []
        rank_model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
        return seen, step(rank_model, batch, mesh)

    alone, expected = call(DeviceMesh.solo())
    counts, found = zip(*on_mesh(call, **{axis: 3}), strict=True)
    assert_equal(found, expected, torch.float64)
    assert alone == [9 + 12 + 7 + 7 - 4 - 6 - 4]  # last tokens, and what was computed before
    assert sum(sum(count) for count in counts) == alone[0]


@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_ranks_may_have_only_tokens_that_are_not_trained(on_mesh, make_batch, axis):
    model, batch = make_model(), make_batch([9, 9, 9, 9], masked_rows=[0, 1, 3])
    found = on_mesh(lambda mesh: step(model, batch, mesh), **{axis: 4})
    assert_equal(found, step(model, batch, DeviceMesh.solo()), torch.float64)


def test_a_critic_has_the_values_and_gradients_of_one_rank(on_mesh, make_batch):
    model, batch = make_model(LlamaForTokenClassification), make_batch([6, 1, 13])

    def call(mesh):
        critic, at = copy.deepcopy(model), trained_positions(batch)
        values = critic_values(ModelShard.whole(critic, mesh), batch, at)
        (values * batch.advantages[at]).sum().backward()
        return [values], gradients_of(critic)

    for axis in ("sp", "cp"):
        assert_equal(on_mesh(call, **{axis: 3}), call(DeviceMesh.solo()), torch.float64)


def test_a_stream_without_tokens_has_gradients_of_zero(on_mesh, make_batch):
    model, batch = make_model(), make_batch([])
    for sizes in ({"sp": 1}, {"sp": 2}, {"cp": 2}):
        for outputs, gradients in on_mesh(lambda mesh: step(model, batch, mesh), **sizes):
            assert [len(output) for output in outputs] == [0, 0]
            assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("lengths", [[13, 30, 7], [3]], ids=str)
def test_filler_of_half_precision_is_behind_the_last_rank(on_mesh, make_batch, lengths):
    model, batch = make_model(dtype=torch.bfloat16), make_batch(lengths)
    (expected, _), gradients = step(model, batch, DeviceMesh.solo())
    found = on_mesh(lambda mesh: step(model, batch, mesh), cp=2, sp=2)
    for (logprobs, _), _ in found:
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=0.05)
    for name, wanted in gradients.items():
        total = sum(rank[name].double() for _, rank in found)
        assert (total - wanted).abs().max() <= 0.05 * wanted.abs().max(), name


def test_heads_that_do_not_divide_are_refused_by_every_rank(on_mesh, make_batch):
    model, batch = make_model(), make_batch([6, 2])

    def call(mesh):
        with pytest.raises(ValueError, match="sp=5 does not divide 12 attention heads"):
            step(model, batch, mesh)

    on_mesh(call, sp=5)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 6])
def test_slices_are_the_stream_and_every_position_belongs_to_the_slice_that_chose_it(num_tokens):
    positions = torch.arange(1, max(1, num_tokens))
    meshes = [dataclasses.replace(DeviceMesh.solo(), tokens=FakeRank(rank), sp=FakeRank(rank)) for rank in range(3)]
    slices = [TokenSlice.of([max(num_tokens, 3)], positions - 1, mesh) for mesh in meshes]
    filled = range(max(3, num_tokens))
    assert [t for part in slices for t in filled[part.tokens]] == list(filled)
    assert torch.equal(torch.cat([positions[part.positions] for part in slices]), positions)
    for part in slices:
        assert all(part.tokens.start <= t - 1 < part.tokens.stop for t in positions[part.positions].tolist())


class FakeRank(Collective):
    """One of three ranks that never talk."""

    size = 3

    def __init__(self, rank):
        self.rank = rank
