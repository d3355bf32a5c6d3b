import math
import pickle

import pytest
from hypothesis import given, strategies as st

from rallypoint.types import AtMaximum, Last, Maximum, Mean, Metrics, Sum, merge

numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(numbers, st.integers(1, 100)), min_size=1), st.data())
def test_a_mean_does_not_depend_on_how_its_parts_were_cut(parts, data):
    metrics = [Metrics({"m": Mean(value * weight, weight)}) for value, weight in parts]
    border = data.draw(st.integers(0, len(metrics)))
    expected = math.fsum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)
    for merged in (merge(*metrics), merge(merge(*metrics[:border]), merge(*metrics[border:]))):
        assert merged.scalars()["m"] == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.lists(numbers, min_size=1))
def test_each_kind_merges_by_its_own_rule(values):
    parts = [Metrics({"sum": Sum(v), "max": Maximum(v), "last": Last(v)}) for v in values]
    merged = merge(*parts).scalars()
    assert merged["sum"] == pytest.approx(math.fsum(values), abs=1e-3)
    assert merged["max"] == max(values)
    assert merged["last"] == values[-1]


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, math.nan]), min_size=1), st.data())
def test_what_stands_at_the_maximum_does_not_depend_on_how_parts_were_cut(values, data):
    parts = [Metrics({"max": Maximum(value), "at": AtMaximum(place, of=value)}) for place, value in enumerate(values)]
    border = data.draw(st.integers(0, len(parts)))
    sizes = [math.inf if math.isnan(value) else value for value in values]
    for merged in (merge(*parts), merge(merge(*parts[:border]), merge(*parts[border:]))):
        assert merged.scalars()["at"] == sizes.index(max(sizes))


@pytest.mark.parametrize("order", [(1.0, math.nan), (math.nan, 1.0), (math.nan, math.nan)])
def test_a_nan_is_never_lost_on_the_way(order):
    for kind in (Maximum, Sum, lambda value: Mean(value, 1)):
        assert math.isnan(merge(*(Metrics({"m": kind(value)}) for value in order))["m"].scalar)


def test_a_mean_of_nothing_is_nan_and_does_not_disturb_a_mean_of_something():
    assert math.isnan(Mean(0.0, 0.0).scalar)
    assert merge({"m": Mean(0.0, 0.0)}, {"m": Mean(6.0, 3)}).scalars() == {"m": 2.0}


def test_a_name_that_only_some_parts_have_is_kept():
    assert merge({"a": Sum(1)}, {"b": Sum(2)}, {}, {"a": Sum(3)}).scalars() == {"a": 4, "b": 2}


def test_merging_nothing_gives_no_metrics():
    assert len(merge()) == len(Metrics.join([])) == 0


def test_one_name_for_two_kinds_is_an_error_that_names_it():
    with pytest.raises(TypeError, match="actor/loss: cannot merge Mean with Sum"):
        merge({"actor/loss": Mean(1, 1)}, {"actor/loss": Sum(1)})


def test_merging_and_prefixing_leave_their_arguments_alone():
    first = Metrics({"m": Sum(1)})
    assert merge(first, first).prefixed("actor").scalars() == {"actor/m": 2}
    assert first.prefixed("actor").prefixed("critic").scalars() == {"actor/m": 1}
    assert first.scalars() == {"m": 1}


def test_metrics_survive_pickling():
    metrics = Metrics({"mean": Mean(1, 2), "sum": Sum(3), "max": Maximum(math.inf), "last": Last(1e-6)})
    assert dict(pickle.loads(pickle.dumps(metrics))) == dict(metrics)
