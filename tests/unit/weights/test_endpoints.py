"""What becomes of tensors on the way into buckets and out of them."""

import dataclasses

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.errors import WeightsMismatchError
from rallypoint.models import Part
from rallypoint.weights import HEADER_BYTES, Held, Manifest, Receiver, Sender, digested
from rallypoint.weights.manifest import rectangles_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def weights(dtype=torch.float32):
    """Every shape that a model may have: matrices, vectors, a number, nothing at all, and a transposed view."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: (torch.randn(*shape, generator=generator) * 100).to(dtype)  # noqa: E731
    return {"matrix": draw(3, 5), "vector": draw(70), "number": draw(1)[0], "empty": draw(0, 4), "turned": draw(2, 6).T}


def manifest_of(tensors, room=128, dtype=None):
    held = {name: Held(dtype or tensor.dtype, Part.whole(tensor.shape)) for name, tensor in tensors.items()}
    return Manifest.of([held], bucket_bytes=HEADER_BYTES + room)


def packed(manifest, tensors, version):
    """The memory of every bucket."""
    source = Sender(tensors)
    for index in range(len(manifest.buckets)):
        memory = torch.zeros(manifest.bucket_bytes, dtype=torch.uint8)
        source.pack(manifest, index, version, memory)
        yield memory


def blank(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("room", [64, 128, 10_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_arrive_as_they_were(dtype, room):
    manifest, target = manifest_of(weights(dtype), room), blank(weights(dtype))
    sink = Receiver(manifest, target, 3)
    for index, memory in enumerate(packed(manifest, weights(dtype), 3)):
        sink.unpack(index, memory)
    sink.finish()
    assert_equal(target, weights(dtype))


def test_nan_and_signed_zeros_keep_their_bits():
    odd = {"w": torch.tensor([float("nan"), -0.0, float("inf"), -float("nan")])}
    manifest, target = manifest_of(odd), blank(odd)
    Receiver(manifest, target, 0).unpack(0, next(packed(manifest, odd, 0)))
    assert target["w"].view(torch.int32).tolist() == odd["w"].view(torch.int32).tolist()


def test_masters_are_rounded_on_their_way():
    manifest, target = manifest_of(weights(), dtype=torch.bfloat16), blank(weights(torch.bfloat16))
    sink = Receiver(manifest, target, 1)
    for index, memory in enumerate(packed(manifest, weights(), 1)):
        sink.unpack(index, memory)
    sink.finish()
    assert_equal(target, {name: tensor.bfloat16() for name, tensor in weights().items()})


@given(st.sampled_from(["matrix", "vector", "number", "turned"]), st.integers(0, 10**6), st.sampled_from(DTYPES))
def test_a_single_flipped_bit_anywhere_is_refused_and_does_not_reach_the_model(name, bit, dtype):
    manifest, target = manifest_of(weights(dtype)), blank(weights(dtype))
    memories = list(packed(manifest, weights(dtype), 9))
    places = [(i, r) for i, bucket in enumerate(manifest.buckets) for r in bucket.rectangles if r.name == name]
    index, rectangle = places[bit % len(places)]
    memories[index][rectangle.start + bit // 8 % (rectangle.stop - rectangle.start)] ^= 1 << bit % 8
    sink = Receiver(manifest, target, 9)
    for place, memory in enumerate(memories):
        sink.unpack(place, memory)
    with pytest.raises(WeightsMismatchError, match=f"version 9 was not loaded: {name} was damaged on its way"):
        sink.finish()
    assert not target[name][rectangle.part.within(Part.whole(rectangle.part.shape))].any()


def test_a_bucket_that_did_not_come_or_came_from_elsewhere_is_refused():
    manifest, target = manifest_of(weights()), blank(weights())
    memories = list(packed(manifest, weights(), 2))
    sink = Receiver(manifest, target, 2)
    for index in (0, 2):
        sink.unpack(index, memories[index])
    num = len(memories)
    with pytest.raises(
        WeightsMismatchError, match=rf"version 2 was not loaded: {num - 2} of {num} buckets did not come"
    ):
        sink.finish()
    sink.unpack(1, memories[2])
    with pytest.raises(WeightsMismatchError, match="expected bucket 1 of version 2, found bucket 2 of 2"):
        sink.finish()


def without(name):
    return {key: tensor for key, tensor in weights().items() if key != name}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (without("matrix"), "weights of another model: matrix"),
        ({**weights(), "head": torch.zeros(1)}, "weights of another model: head"),
        (
            {**weights(), "matrix": torch.zeros(5, 3)},
            r"matrix: torch.float32 \[3, 5\] instead of torch.float32 \[5, 3\]",
        ),
        ({**weights(), "number": torch.zeros(1)}, r"number: .*\[\] instead of .*\[1\]"),
        (
            {**weights(), "vector": torch.zeros(70).bfloat16()},
            r"vector: torch.float32 \[70\] instead of torch.bfloat16",
        ),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_is_sent(target, message):
    with pytest.raises(WeightsMismatchError, match=message):
        manifest_of(weights()).check(target)
    manifest_of(weights()).check(weights())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 50))
def test_rectangles_cover_a_part_once_and_keep_to_their_size(sizes, most):
    seen = torch.zeros(sizes, dtype=torch.int64)
    for part in rectangles_of(Part.whole(sizes), most):
        assert 0 < part.num_elements <= most
        seen[part.within(Part.whole(sizes))] += 1
    assert (seen == 1).all()


def test_what_several_ranks_hold_is_sent_once_and_buckets_come_in_turns():
    parts = [Part.whole([8, 16]).rows(start, start + 4) for start in (0, 4)]
    shared = Held(torch.float32, Part.whole([16]))
    ranks = [{"w": Held(torch.float32, part), "b": shared} for part in (*parts, *parts)]
    manifest = Manifest.of(ranks, bucket_bytes=HEADER_BYTES + 128)
    assert [bucket.sender for bucket in manifest.buckets] == [0, 1, 0, 1, 0]
    sent = [r for bucket in manifest.buckets for r in bucket.rectangles]
    assert sum(r.stop - r.start for r in sent) == manifest.num_bytes == 4 * (8 * 16 + 16)
    assert all(bucket.num_bytes <= manifest.bucket_bytes for bucket in manifest.buckets)


def test_parts_that_overlap_or_leave_something_out_are_no_manifest():
    half = Held(torch.float32, Part.whole([8, 16]).rows(0, 4))
    more = dataclasses.replace(half, part=Part.whole([8, 16]).rows(3, 8))
    for ranks in ([{"w": half}], [{"w": half}, {"w": more}]):
        with pytest.raises(AssertionError, match="parts overlap, or leave something out"):
            Manifest.of(ranks)


def test_loading_goes_into_parameters_that_are_trained_and_keeps_them_trainable():
    parameter, ones = torch.nn.Parameter(torch.zeros(2, 2)), {"w": torch.ones(2, 2)}
    manifest = manifest_of(ones)
    Receiver(manifest, {"w": parameter}, 0).unpack(0, next(packed(manifest, ones, 0)))
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert parameter.sum() == 4


def test_a_digest_is_of_names_shapes_types_and_bits_and_not_of_order_or_layout():
    base = digested(weights())
    assert digested(dict(reversed(weights().items()))) == base
    assert digested({**weights(), "turned": weights()["turned"].contiguous()}) == base
    others = [
        without("empty"),
        {**without("matrix"), "matrices": weights()["matrix"]},
        {**weights(), "matrix": weights()["matrix"].view(5, 3)},
        {**weights(), "matrix": weights()["matrix"].view(torch.int32)},
        {**weights(), "vector": weights()["vector"].flip(0)},
        {**weights(), "empty": torch.zeros(4, 0)},
    ]
    assert len({base, *(digested(other) for other in others)}) == len(others) + 1
