"""From logits to a token, given one random number."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 2**20


def sample(logits: Tensor, temperature: float, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row, or take the likeliest when the temperature is 0.

    The token is where the cumulative distribution passes the random number. It is summed in float64,
    so that a token is drawn as often as its probability says, also in a vocabulary of 150k.

    Args:
        logits: [B, V], any float type.
        temperature: at least 0.
        numbers: [B] float64 in [0, 1).

    Returns:
        tokens [B] int64, and their logprobs [B] float32 in the distribution that was drawn from
        (for temperature 0: in the model's own). NaN where the logits of a row are not finite.
    """
    everything = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    tokens = everything.argmax(-1) if temperature == 0 else _invert(everything, numbers)
    return tokens, everything.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _invert(logprobs: Tensor, numbers: Tensor) -> Tensor:
    """Return the first token at which the cumulative probability exceeds the row's number."""
    rows_at_once = max(1, _CHUNK_BYTES // (8 * logprobs.shape[-1]))
    tokens: list[Tensor] = []
    for part, number in zip(logprobs.split(rows_at_once), numbers.split(rows_at_once), strict=True):
        cumulative = part.double().exp().cumsum(-1)
        total = cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, number.unsqueeze(-1) * total, right=True)
        # Rounding may push number * total onto total itself; the last token with any probability ends there.
        last = torch.searchsorted(cumulative, total.contiguous())
        # In a row of NaN both are behind the last token.
        tokens.append(torch.minimum(drawn, last).squeeze(-1).clamp(max=logprobs.shape[-1] - 1))
    return torch.cat(tokens)
