"""Linear attention over packed rows, against the recurrence token by token in float64."""

import dataclasses
import itertools

import pytest
import torch
from grids import thinned
from parity_rank import Case, Models, make_batch, run
from tiny_families import make_family_model
from torch.nn import functional

from rallypoint.cluster.mesh import Mesh
from rallypoint.engine import policy_outputs
from rallypoint.engine.forward import trained_positions
from rallypoint.model_files import load_policy
from rallypoint.models.kinds.linear_attention import DeltaHeads, DeltaInputs, DeltaStates, Recurrence
from rallypoint.parallel import DeviceMesh
from rallypoint.parallel.mesh import AXES
from rallypoint.roles.dealing import deal
from rallypoint.types import Sequences

HEADS = DeltaHeads(num_keys=2, num_values=4, key_dim=3, value_dim=5)
WIDTH = 4
CPU = torch.device("cpu")
ROWS = {"short": (3, 1, 0, 9), "a chunk": (16, 2, 17), "several chunks": (5, 130, 64, 65, 1)}


def make_inputs(num_tokens: int) -> DeltaInputs:
    generator = torch.Generator().manual_seed(num_tokens)
    channels = 2 * sum(HEADS.widths)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    decay, strength = -functional.softplus(draw(num_tokens, 4)), draw(num_tokens, 4).sigmoid()
    tensors = draw(num_tokens, channels), draw(channels, WIDTH) / 2, decay, strength
    return DeltaInputs(*(tensor.requires_grad_() for tensor in tensors), HEADS)


def token_by_token(inputs: DeltaInputs, lengths: tuple[int, ...]) -> torch.Tensor:
    """Return what each token reads, by the formulas of the paper: [T, Hv, Dv]."""
    outs: list[torch.Tensor] = []
    for tokens in torch.arange(sum(lengths)).split(list(lengths)):
        memory = torch.zeros(HEADS.num_values, HEADS.key_dim, HEADS.value_dim, dtype=torch.float64)
        for place, token in enumerate(tokens.tolist()):
            seen = range(max(0, place + 1 - WIDTH), place + 1)
            mixed = sum(inputs.mixed[tokens[one]] * inputs.kernel[:, WIDTH - 1 - place + one] for one in seen)
            query, key, value = functional.silu(mixed).view(2, 16).split([3, 3, 10], 1)  # by key heads
            query, key = (
                (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, 0) for x in (query, key)
            )
            memory = memory * inputs.decay[token].exp()[:, None, None]
            wrong = value.reshape(4, 5) - (key.unsqueeze(1) @ memory).squeeze(1)
            memory = memory + key.unsqueeze(2) * (inputs.strength[token].unsqueeze(1) * wrong).unsqueeze(1)
            outs.append((query.unsqueeze(1) @ memory).squeeze(1) / 3**0.5)
    return torch.stack(outs)


def run_rows(inputs: DeltaInputs, lengths: tuple[int, ...]) -> tuple[torch.Tensor, DeltaStates]:
    recurrence = Recurrence(torch.tensor([0, *lengths]).cumsum(0), CPU)
    return recurrence.run(inputs, recurrence.blank(inputs))


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS.keys())
def test_rows_read_what_the_recurrence_of_each_row_alone_says_and_so_do_gradients(lengths):
    inputs = make_inputs(sum(lengths))
    got, wanted = run_rows(inputs, lengths)[0], token_by_token(inputs, lengths)
    assert (got - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    weigh = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view(got.shape)
    tensors = inputs[:4]
    for ours, theirs in zip(*(torch.autograd.grad((x * weigh).sum(), tensors) for x in (got, wanted)), strict=True):
        assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(1, 1, 1), (2, 40, 64), (0, 129, 3)])
def test_rows_go_on_from_the_states_of_their_first_parts(cuts):
    lengths = (5, 130, 70)
    inputs = make_inputs(sum(lengths))
    whole, end = run_rows(inputs, lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    first = torch.cat([torch.arange(start, start + cut) for start, cut in zip(starts, cuts, strict=True)])
    is_first = torch.isin(torch.arange(sum(lengths)), first)

    def part(chosen: torch.Tensor) -> DeltaInputs:
        mixed, decay, strength = (x[chosen] for x in (inputs.mixed, inputs.decay, inputs.strength))
        return DeltaInputs(mixed, inputs.kernel, decay, strength, HEADS)

    before, states = run_rows(part(is_first), cuts)
    left = torch.tensor([0, *(length - cut for length, cut in zip(lengths, cuts, strict=True))]).cumsum(0)
    after, states = Recurrence(left, CPU).run(part(~is_first), states)
    torch.testing.assert_close(before, whole[is_first], rtol=0, atol=1e-13)
    torch.testing.assert_close(after, whole[~is_first], rtol=0, atol=1e-13)
    for got, wanted in zip(states, end, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-13)


def test_a_prompt_that_rows_share_is_computed_once_with_the_same_gradients(tmp_path):
    shard = load_policy(make_family_model(tmp_path, "qwen3_5_text"), dtype="float64")
    generator = torch.Generator().manual_seed(0)
    prompt, *ends = (torch.randint(23, (length,), generator=generator) for length in (11, 3, 70, 1))
    rows = [torch.cat([prompt, end]) for end in ends]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    mask[offsets[:-1]] = False
    together = Sequences(
        offsets=offsets,
        tokens=torch.cat(rows),
        loss_mask=mask,
        prompt_index=torch.zeros(3, dtype=torch.int64),
        sample_index=torch.arange(3),
    )
    found = []
    for batch in (together, dataclasses.replace(together, prompt_index=torch.arange(3))):
        shard.model.zero_grad()
        logprobs = policy_outputs(shard, batch, trained_positions(batch), 1.0).logprobs
        (logprobs @ torch.linspace(-1, 1, len(logprobs), dtype=torch.float64)).backward()
        found.append({"logprobs": logprobs.detach()} | {n: w.grad.clone() for n, w in shard.model.named_parameters()})
    for name, wanted in found[1].items():
        assert (found[0][name] - wanted).abs().max() <= 1e-10 * wanted.abs().max(), name


MESHES = {"tp4": {"tp": 4}, "shard2 x tp2": {"dp_shard": 2, "tp": 2}, "sp2 x tp2": {"sp": 2, "tp": 2}}


@pytest.mark.parametrize(
    ("family", "name"),
    thinned(
        itertools.product(["qwen3_5_text", "qwen3_next"], MESHES),
        ("qwen3_next", "tp4"),
        ("qwen3_5_text", "shard2 x tp2"),
        ("qwen3_next", "sp2 x tp2"),
    ),
)
def test_ranks_that_share_key_heads_take_the_steps_of_one(on_mesh, tmp_path, family, name):
    sizes = MESHES[name]
    make_family_model(tmp_path / family, family, num_key_value_heads=4)
    case = Case("tp", "packed", "many", "actor", "float64", family)
    batch, grid = make_batch("actor"), Mesh({axis: sizes.get(axis, 1) for axis in AXES})
    parts = deal(batch, grid.num_parts, 0.01)[0]

    def steps(mesh, part):
        return run(case, Models(str(tmp_path), mesh), part, batch.num_loss_tokens)

    found = on_mesh(lambda mesh: steps(mesh, parts[grid.part(mesh.rank)]), **sizes)
    expected = steps(DeviceMesh.solo(), batch)
    whole = found[0] | {"loss": torch.stack([found[rank]["loss"] for rank in grid.leaders]).sum()}
    for name, wanted in expected.items():
        if not name.startswith("held/"):
            assert (whole[name] - wanted).abs().max() <= 1e-10 * wanted.abs().max(), name
    held = sum(tensor.numel() for name, tensor in found[0].items() if name.startswith("held/") and "linear" in name)
    of_one = sum(tensor.numel() for name, tensor in expected.items() if name.startswith("held/") and "linear" in name)
    assert held <= of_one / (sizes["tp"] * sizes.get("dp_shard", 1)) + 8, "all but the norm of heads is cut"
