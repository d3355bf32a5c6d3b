"""Random batches for the checks of `rallypoint.testing`."""

from hypothesis import strategies as st

from rallypoint.testing.cases import make_case


@st.composite
def random_cases(draw):
    """One batch of up to five rows, by name."""
    lengths = draw(st.lists(st.integers(0, 6), max_size=5))
    groups = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    spread, trained = draw(st.sampled_from([0.0, 0.02, 0.5, 4.0])), draw(st.sampled_from([0.5, 1.0]))
    return {"random": make_case(lengths, groups, seed=draw(st.integers(0, 10**6)), spread=spread, trained=trained)}
