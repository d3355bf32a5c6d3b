import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import WeightsMismatchError
from rallypoint.weights import Snapshot, fingerprint, load, take

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def weights(dtype=torch.float32):
    """Every shape that a model may have: matrices, vectors, a number, nothing at all, and a transposed view."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: (torch.randn(*shape, generator=generator) * 100).to(dtype)  # noqa: E731
    return {"matrix": draw(3, 5), "vector": draw(7), "number": draw(1)[0], "empty": draw(0, 4), "turned": draw(2, 6).T}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("send", [lambda s: s, lambda s: pickle.loads(pickle.dumps(s))], ids=["kept", "pickled"])
def test_weights_arrive_as_they_were_taken(dtype, send):
    target = {name: torch.zeros_like(tensor) for name, tensor in weights(dtype).items()}
    load(send(take(3, weights(dtype))), target)
    assert_equal(target, weights(dtype))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_snapshot_is_read_from_shared_memory_without_a_copy():
    snapshot, buffers = take(1, weights()), []
    data = pickle.dumps(snapshot, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 4_000
    assert sum(len(buffer.raw()) for buffer in buffers) == sum(4 * tensor.numel() for tensor in weights().values())
    arrived = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    target = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    load(arrived, target)
    assert_equal(target, weights())
    assert (arrived.version, arrived.fingerprint) == (1, snapshot.fingerprint)


def test_nan_and_signed_zeros_keep_their_bits():
    odd = {"w": torch.tensor([float("nan"), -0.0, float("inf"), -float("nan")])}
    arrived = pickle.loads(pickle.dumps(take(0, odd)))
    assert arrived.weights["w"].view(torch.int32).tolist() == odd["w"].view(torch.int32).tolist()
    assert fingerprint(arrived.weights) == fingerprint(odd)


def test_training_on_does_not_change_what_was_taken():
    trained = weights()
    snapshot = take(1, trained)
    for tensor in trained.values():
        tensor.fill_(7.0)
    assert_equal(snapshot.weights, weights())


@given(st.sampled_from(["matrix", "vector", "number", "turned"]), st.integers(0, 10**6), st.sampled_from(DTYPES))
def test_a_single_flipped_bit_anywhere_is_refused_and_nothing_is_loaded(name, bit, dtype):
    snapshot = take(9, weights(dtype))
    raw = snapshot.weights[name].contiguous().reshape(-1).view(torch.uint8).clone()
    bit %= 8 * len(raw)
    raw[bit // 8] ^= 1 << (bit % 8)
    damaged = raw.view(dtype).view(snapshot.weights[name].shape)
    target = {key: torch.zeros_like(tensor) for key, tensor in weights(dtype).items()}
    with pytest.raises(WeightsMismatchError, match="version 9 was damaged on its way"):
        load(Snapshot(9, snapshot.fingerprint, {**snapshot.weights, name: damaged}), target)
    assert all(not tensor.any() for tensor in target.values())


def without(name):
    return {key: tensor for key, tensor in weights().items() if key != name}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (without("matrix"), "is of another model: matrix"),
        ({**weights(), "head": torch.zeros(1)}, "is of another model: head"),
        (
            {**weights(), "matrix": torch.zeros(5, 3)},
            r"matrix: torch.float32 \[3, 5\] instead of torch.float32 \[5, 3\]",
        ),
        ({**weights(), "number": torch.zeros(1)}, r"number: .*\[\] instead of .*\[1\]"),
        ({**weights(), "vector": torch.zeros(7).bfloat16()}, r"vector: torch.float32 \[7\] instead of torch.bfloat16"),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_is_loaded(target, message):
    before = {name: tensor.clone() for name, tensor in target.items()}
    with pytest.raises(WeightsMismatchError, match=message):
        load(take(2, weights()), target)
    assert_equal(target, before)


def test_a_fingerprint_is_of_names_shapes_types_and_bits_and_not_of_order_or_layout():
    base = fingerprint(weights())
    assert fingerprint(dict(reversed(weights().items()))) == base
    assert fingerprint({**weights(), "turned": weights()["turned"].contiguous()}) == base
    others = [
        without("empty"),
        {**without("matrix"), "matrices": weights()["matrix"]},
        {**weights(), "matrix": weights()["matrix"].view(5, 3)},
        {**weights(), "matrix": weights()["matrix"].view(torch.int32)},
        {**weights(), "vector": weights()["vector"].flip(0)},
        {**weights(), "empty": torch.zeros(4, 0)},
    ]
    assert len({base, *(fingerprint(other) for other in others)}) == len(others) + 1


def test_loading_goes_into_parameters_that_are_trained_and_keeps_them_trainable():
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    load(take(0, {"w": torch.ones(2, 2)}), {"w": parameter})
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert parameter.sum() == 4
