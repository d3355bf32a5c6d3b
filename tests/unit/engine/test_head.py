"""Chunked logprobs and entropies against the plain way, which holds all logits: values and gradients."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rallypoint.engine import policy_outputs
from rallypoint.errors import ModelError
from rallypoint.models import ModelShard
from rallypoint.models.head import CHUNK_BYTES, head_outputs

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
LEAVES = ("states", "weight", "bias")


def plainly(states, weight, bias, targets, temperature, softcap=None):
    logits = functional.linear(states, weight, bias)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    everything = (logits / temperature).log_softmax(-1)
    return everything.gather(1, targets.unsqueeze(1)).squeeze(1), -(everything.exp() * everything).sum(-1)


@dataclasses.dataclass
class Case:
    """Inputs of the head, and which results and inputs take part in a gradient."""

    states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    temperature: float
    used: frozenset[str]
    wanted: frozenset[str]

    def results(self, function, **options):
        """Return both outputs, and the gradients of a weighted sum of those that are used."""
        leaves = {}
        for name in LEAVES:
            tensor = getattr(self, name)
            leaves[name] = None if tensor is None else tensor.clone().requires_grad_(name in self.wanted)
        logprobs, entropy, *_ = function(*leaves.values(), self.targets, self.temperature, **options)
        found = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
        asked = [leaf for leaf in leaves.values() if leaf is not None and leaf.requires_grad]
        total = logprobs.new_zeros(())
        for index, name in enumerate(sorted(self.used)):
            generator = torch.Generator().manual_seed(index)
            weigh = torch.randn(len(self.targets), generator=generator, dtype=torch.float64)
            total = total + ({"logprobs": logprobs, "entropy": entropy}[name] * weigh.to(logprobs.dtype)).sum()
        if asked and self.used:
            total.backward()
        return found | {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf is not None}


def make_case(*, num_tokens, vocabulary, dtype=torch.float64, bias=True, temperature=1.0, seed=0, **choices) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Case(
        states=draw(num_tokens, 6),
        weight=draw(vocabulary, 6),
        bias=draw(vocabulary) if bias else None,
        targets=torch.randint(vocabulary, (num_tokens,), generator=generator),
        temperature=temperature,
        used=frozenset(choices.get("used", ("logprobs", "entropy"))),
        wanted=frozenset(choices.get("wanted", LEAVES)),
    )


def assert_same(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted is None or not wanted.numel():
            assert actual[name] is None or not actual[name].any(), name
            continue
        error = (actual[name] - wanted).abs().max()
        assert error <= tolerance * max(1.0, float(wanted.abs().max())), (name, float(error))


@settings(max_examples=2 * settings.default.max_examples)
@given(
    num_tokens=st.integers(0, 40),
    vocabulary=st.integers(1, 30),
    rows_per_chunk=st.integers(1, 45),
    rows_kept=st.integers(0, 90),
    dtype=st.sampled_from(list(TOLERANCES)),
    bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.5, 0.7, 3.0]),
    softcap=st.sampled_from([None, 2.0]),
    used=st.sets(st.sampled_from(["logprobs", "entropy"])),
    wanted=st.sets(st.sampled_from(LEAVES)),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_the_plain_way_for_every_chunk_size(
    rows_per_chunk, rows_kept, dtype, vocabulary, softcap, **shape
):
    case = make_case(vocabulary=vocabulary, dtype=dtype, **shape)
    row_bytes = vocabulary * dtype.itemsize
    bounds = {"chunk_bytes": rows_per_chunk * row_bytes, "kept_bytes": rows_kept * row_bytes}
    chunked = case.results(head_outputs, softcap=softcap, **bounds)
    assert_same(chunked, case.results(plainly, softcap=softcap), TOLERANCES[dtype])


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 100])
def test_a_weight_that_also_embeds_gets_the_gradients_of_both_uses(rows_per_chunk):
    case = make_case(num_tokens=12, vocabulary=9, bias=False)
    grads = []
    for function, options in ((plainly, {}), (head_outputs, {"chunk_bytes": rows_per_chunk * 9 * 8})):
        weight = case.weight.clone().requires_grad_()
        states = functional.embedding(case.targets.flip(0), weight).tanh()
        logprobs, entropy, *_ = function(states, weight, None, case.targets, 0.7, **options)
        (logprobs.sum() - 0.1 * entropy.sum()).backward()
        grads.append(weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)


def test_gradients_pass_torch_s_own_finite_differences():
    case = make_case(num_tokens=5, vocabulary=7)
    leaves = [getattr(case, name).requires_grad_() for name in LEAVES]

    def function(*leaves):
        return head_outputs(*leaves, case.targets, 0.8, chunk_bytes=2 * 7 * 8)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 4000])
def test_the_same_call_gives_the_same_bits_with_and_without_gradients(dtype, chunk_bytes):
    case = make_case(num_tokens=64, vocabulary=100, dtype=dtype)
    first, again = (case.results(head_outputs, chunk_bytes=chunk_bytes) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    with torch.no_grad():
        alone = head_outputs(case.states, case.weight, case.bias, case.targets, 1.0, chunk_bytes=chunk_bytes)
    assert torch.equal(alone[0], first["logprobs"])
    assert torch.equal(alone[1], first["entropy"])


def test_half_precision_is_as_near_to_the_truth_as_the_plain_way():
    case = make_case(num_tokens=64, vocabulary=100, dtype=torch.bfloat16)
    truth = dataclasses.replace(
        case, states=case.states.double(), weight=case.weight.double(), bias=case.bias.double()
    ).results(plainly)
    for chunk_bytes in (CHUNK_BYTES, 4000):
        found = case.results(head_outputs, chunk_bytes=chunk_bytes)
        assert found["logprobs"].dtype == found["entropy"].dtype == torch.float32
        for name, wanted in truth.items():
            assert (found[name].double() - wanted).abs().max() <= 0.02 * wanted.abs().max(), name


def test_a_policy_that_is_almost_sure_has_an_entropy_that_is_small_and_right():
    logits = torch.tensor([[20.0, 0.0, 0.0], [0.0, 200.0, 0.0]])
    _, entropy, _ = head_outputs(logits, torch.eye(3), None, torch.tensor([0, 1]), 1.0)
    share = torch.tensor([-20.0], dtype=torch.float64).exp()
    assert float(entropy[0]) == pytest.approx(float(2 * share * 20), rel=0.06)  # log1p(2e) is lost in float32
    assert float(entropy[1]) == 0.0


def test_nan_in_one_state_stays_with_its_token():
    case = make_case(num_tokens=6, vocabulary=5, dtype=torch.float32)
    case.states[2] = float("nan")
    for values in head_outputs(case.states, case.weight, case.bias, case.targets, 1.0, chunk_bytes=2 * 5 * 4):
        assert values.isnan().tolist() == [False, False, True, False, False, False]


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor has that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_or_the_weight():
    case = make_case(num_tokens=400, vocabulary=300, dtype=torch.float32, bias=False)
    with Largest() as chunked:
        case.results(head_outputs, chunk_bytes=10 * 300 * 4)
    with Largest() as plain:
        case.results(plainly)
    assert chunked.elements == 10 * 300
    assert plain.elements == 400 * 300


def test_a_head_that_is_more_than_a_matrix_is_refused(make_policy, make_batch):
    class Scaled(nn.Linear):
        def forward(self, states):
            return super().forward(states) * 2

    model, batch = make_policy(), make_batch([4])
    model.lm_head = Scaled(16, 20, bias=False)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has a Scaled for its head; expected a plain nn\.Linear"):
        policy_outputs(ModelShard.whole(model), batch, torch.tensor([1, 2]), 1.0)


def test_tokens_that_the_head_excludes_leave_logprobs_entropy_and_gradients_of_the_others_as_they_are():
    case = make_case(num_tokens=5, vocabulary=6)
    assert case.bias is not None
    case.targets.clamp_(max=3)
    excluded = dataclasses.replace(case, bias=torch.where(torch.arange(6) >= 4, -torch.inf, case.bias))
    fewer = dataclasses.replace(case, weight=case.weight[:4], bias=case.bias[:4])
    found, wanted = (c.results(head_outputs) for c in (excluded, fewer))
    for name in ("logprobs", "entropy", "grad_states"):
        torch.testing.assert_close(found[name], wanted[name])
    for name in ("grad_weight", "grad_bias"):
        torch.testing.assert_close(found[name][:4], wanted[name])
        assert not found[name][4:].any()
