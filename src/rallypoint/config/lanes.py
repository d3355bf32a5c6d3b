"""How many lanes the passes of a rank may have: of the engine, which has them, and of the plan of its memory."""

_LANE_BYTES = 2**30
"""Of the gradients that further lanes may add up for themselves, beside those that are stepped.

A model that has more does not need lanes: its operations are so large that they keep several cores busy by themselves.
"""


def max_lanes(num_threads: int, gradient_bytes: int) -> int:
    """Return how many lanes a rank may have on a CPU, of as many threads each as there are for it.

    >>> max_lanes(16, gradient_bytes=0), max_lanes(16, gradient_bytes=200 * 2**20), max_lanes(2, gradient_bytes=2**31)
    (16, 5, 1)

    Args:
        num_threads: that operations may use.
        gradient_bytes: of the gradients that a lane adds up; 0 where there are none.
    """
    most = num_threads if gradient_bytes == 0 else min(num_threads, 1 + _LANE_BYTES // gradient_bytes)
    threads_per_lane = -(-num_threads // most)
    return num_threads // threads_per_lane
