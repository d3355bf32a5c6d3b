"""Rollouts of two devices or of two ways through a model, compared up to where they part."""

import torch

GAPS = {"float32": 1e-4, "bfloat16": 0.3}
"""Between logprobs, in nats."""
DIFFERING = {"float32": 1e-3, "bfloat16": 0.05}
"""Part of the draws that may differ, given the same tokens before; `native.engine` says why. On a CPU it is 0 and
0.025."""


def responses(batch):
    """Tokens and logprobs of each, by prompt and sample."""
    found = {}
    for row in range(len(batch)):
        tokens = batch.response(row).tolist()
        logprobs = batch.rollout_logprobs[slice(*batch.offsets[row : row + 2].tolist())]
        found[int(batch.prompt_index[row]), int(batch.sample_index[row])] = tokens, logprobs[-len(tokens) :]
    return found


def assert_alike(found, expected, dtype, gap=None):
    """Compare rollouts up to where they part, within another gap than that of the type, and count how often they do."""
    assert found.keys() == expected.keys()
    num_draws, num_differing = 0, 0
    for name, (wanted, wanted_logprobs) in expected.items():
        tokens, logprobs = found[name]
        pairs = enumerate(zip(tokens, wanted, strict=False))
        num = next((place for place, (one, other) in pairs if one != other), min(len(tokens), len(wanted)))
        torch.testing.assert_close(
            logprobs[:num].double(), wanted_logprobs[:num].double(), rtol=0, atol=gap or GAPS[dtype]
        )
        num_differing += tokens != wanted
        num_draws += num + (tokens != wanted)
    assert num_differing <= DIFFERING[dtype] * num_draws, (num_differing, num_draws)
