"""What every engine is asked for, ours and those of others: one change of `SamplingParams` at a time, then all."""

import queue
from collections.abc import Sequence
from typing import Any

TEXT = "0123456789abcdefghij"

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.6},
    "of a colder policy": {"policy_temperature": 0.6},
    "greedy of a warm policy": {"temperature": 0.0, "policy_temperature": 1.5},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7, "temperature": 1.5},
    "min-p": {"min_p": 0.3},
    "penalty": {"repetition_penalty": 1.7},
    "at least": {"min_new_tokens": 6},
    "stop strings": {"stop_strings": ("12", "j"), "stop_tokens": ()},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.8, "min_new_tokens": 3},
}


def decode(tokens: Sequence[int]) -> str:
    """Return a text with one character for each token of a vocabulary of 20."""
    return "".join(TEXT[token] for token in tokens)


def outputs_of(thread, request):
    """Yield the outputs of a request as they come."""
    outputs = queue.SimpleQueue()
    thread.submit(request, outputs.put)
    while True:
        output = outputs.get()
        if output.error is not None:
            raise output.error
        yield output
        if output.finish_reason is not None:
            return
