"""From logits to a token, given one random number.

Owns: what narrows a distribution, and in which order (that of transformers). Must not know: models, requests.
Invariant: a row's token and logprobs depend on its own logits, rules and number only.

On a CPU `sample` computes without Python, see `rallypoint.generation.script`.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch._jit_internal import is_scripting
from torch.nn import functional

from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.generation.protocol import SamplingParams
from rallypoint.generation.script import without_python

_CHUNK_BYTES = 2**20
"""Of the float64 numbers that exist at once; more would leave the cache."""
_BLOCK = 256
"""Tokens whose probabilities are summed before the block with the drawn one is searched."""


class Draws(NamedTuple):
    """One token of each row; all are [B]."""

    tokens: Tensor
    """int64."""
    logprobs: Tensor
    """float32: in the whole distribution at the temperature (for temperature 0: at 1); NaN where logits are not
    finite."""
    sampled_logprobs: Tensor
    """float32: in the distribution that was drawn from; 0 for temperature 0."""


class Rules(NamedTuple):
    """How each of some rows is drawn from, as tensors on the device of the logits."""

    temperature: Tensor | None
    """[B, 1] float32, or [1, 1] if all have the same; 1 for greedy rows; None for 1 everywhere."""
    greedy: Tensor | None
    """[n] int64: rows that take the likeliest token; None for none."""
    filtered: Tensor | None
    """[n] int64: rows whose tail is cut off; None for none."""
    top_k: Tensor
    """[n, 1] int64, of the filtered rows, or [1, 1] if all have the same."""
    top_p: Tensor
    """Likewise, float64."""
    min_p: Tensor
    """Likewise, float32."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        """Collect the rules of some rows."""
        alike = all(one is params[0] for one in params)
        kinds = params[:1] if alike else params
        rows = [range(len(params))] if alike else [[row] for row in range(len(params))]
        cut = [p.temperature > 0 and (p.top_k is not None or p.top_p < 1 or p.min_p > 0) for p in kinds]

        def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device).unsqueeze(1)

        def indices(chosen: Iterable[bool]) -> Tensor | None:
            found = [row for kind, is_chosen in zip(rows, chosen, strict=True) if is_chosen for row in kind]
            return torch.tensor(found, device=device) if found else None

        is_plain = all(p.temperature in (0, 1) for p in kinds)
        return cls(
            temperature=None if is_plain else column((p.temperature or 1.0 for p in kinds), torch.float32),
            greedy=indices(p.temperature == 0 for p in kinds),
            filtered=indices(cut),
            top_k=column((p.top_k or 2**31 for p in compress(kinds, cut)), torch.int64),
            top_p=column((p.top_p for p in compress(kinds, cut)), torch.float64),
            min_p=column((p.min_p for p in compress(kinds, cut)), torch.float32),
        )


class Raw(NamedTuple):
    """Some rows of logits as they were before penalties and bans; the other rows have none."""

    rows: Tensor
    """[n] int64."""
    logits: Tensor
    """[n, V]."""


def sample(logits: Tensor, rules: Rules, numbers: Tensor, raw: Raw | None = None) -> Draws:
    """Draw one token per row, or take the likeliest where the temperature is 0.

    The token is where the cumulative distribution passes the random number. It is summed in float64,
    so that a token is drawn as often as its probability says, also in a vocabulary of 150k.

    Args:
        logits: [B, V], any float type.
        rules: of the rows.
        numbers: [B] float64 in [0, 1).
        raw: where there are penalties or bans.
    """
    return Draws(*without_python(draw, logits.device)(logits, rules, numbers, raw))


def draw(logits: Tensor, rules: Rules, numbers: Tensor, raw: Raw | None) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `sample` does, in Python; return the fields of `Draws`, of which TorchScript would make a new class."""
    filtered, greedy = rules.filtered, rules.greedy
    whole = _shares(logits, rules.temperature)
    total = _block_sums(whole)
    shares, sums = whole, total
    if filtered is not None:
        kept = _cut(shares.index_select(0, filtered), rules)
        shares = shares.index_copy(0, filtered, kept)
        sums = sums.index_copy(0, filtered, _block_sums(kept))
    tokens = _invert(shares, sums, numbers).clamp_(max=logits.shape[1] - 1)  # a row of NaN has no token
    if greedy is not None:
        tokens[greedy] = logits.index_select(0, greedy).argmax(-1)
    chosen = tokens.unsqueeze(1)
    logprobs = _logprobs(whole, total, chosen)
    if raw is None and filtered is None and greedy is None:
        return tokens, logprobs, logprobs
    if raw is not None:  # there a token may be less likely than the smallest share that is not 0
        changed, temperature = raw.rows, rules.temperature
        if temperature is not None and len(temperature) != 1:
            temperature = temperature.index_select(0, changed)
        own = _scaled(raw.logits, temperature).log_softmax(-1).gather(1, chosen.index_select(0, changed))
        logprobs = logprobs.index_copy(0, changed, own.squeeze(1))
    sampled = _logprobs(shares, sums, chosen)
    if greedy is not None:
        sampled[greedy] = torch.where(logprobs[greedy].isnan(), float("nan"), 0.0)
    return tokens, logprobs, sampled


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Return logits [B, V] with those of tokens that a row has already made less likely (arXiv 1909.05858).

    >>> penalise(torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0, 1, 1]]), torch.tensor([[2.0]]))
    tensor([[ 1., -4.,  1.]])

    Args:
        logits: [B, V].
        seen: [B, L] int64, token ids; the same one may stand there many times.
        penalty: [B, 1] float32.
    """
    chosen = logits.gather(1, seen)
    return logits.scatter(1, seen, torch.where(chosen > 0, chosen / penalty, chosen * penalty).to(logits.dtype))


def _scaled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Return logits in float32, at the temperature."""
    return logits.float() if temperature is None else logits.float() / temperature


def _shares(logits: Tensor, temperature: Tensor | None, block: int = _BLOCK) -> Tensor:
    """Return the probabilities of all tokens, filled up with zeros: [B, V] -> [B, blocks * 256] float32."""
    shares = _scaled(logits, temperature).softmax(-1)
    padding = -shares.shape[1] % block
    return functional.pad(shares, (0, padding)) if padding else shares


def _block_sums(shares: Tensor, block: int = _BLOCK, chunk_bytes: int = _CHUNK_BYTES) -> Tensor:
    """[B, blocks * 256] -> [B, blocks] float64."""
    # Kernels of accelerators turn numbers into others while they add them up.
    if not is_scripting() and not computes_in_pieces(shares.device):
        return shares.view(len(shares), -1, block).sum(-1, dtype=torch.float64)
    rows_at_once = min(len(shares), max(1, chunk_bytes // (8 * shares.shape[1])))
    room = torch.empty(rows_at_once, shares.shape[1], dtype=torch.float64, device=shares.device)
    sums = [room[: len(part)].copy_(part).view(len(part), -1, block).sum(-1) for part in shares.split(rows_at_once)]
    return torch.cat(sums) if len(sums) != 1 else sums[0]


def _invert(shares: Tensor, sums: Tensor, numbers: Tensor, block: int = _BLOCK) -> Tensor:
    """Return the first token at which the cumulative share exceeds the row's number: first its block, then itself."""
    cumulative = sums.cumsum(-1)
    target = numbers.unsqueeze(1) * cumulative[:, -1:]
    found = _first_above(cumulative, target)
    within = shares.view(len(shares), -1, block).gather(1, found.unsqueeze(2).expand(-1, 1, block)).squeeze(1)
    before = (cumulative - sums).gather(1, found)
    return (found * block + _first_above(within.double().cumsum(-1), target - before)).squeeze(1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first place at which a cumulative sum exceeds its target, [B, 1]; never one that adds nothing."""
    # Rounding may push the target below all, or onto the end.
    end = cumulative[:, -1:]
    below_end = torch.nextafter(end, torch.zeros_like(end))
    found = torch.searchsorted(cumulative, torch.minimum(target.clamp(min=0.0), below_end), right=True)
    # In a row of NaN it is behind the last place.
    return found.clamp_(max=cumulative.shape[1] - 1)


def _cut(shares: Tensor, rules: Rules) -> Tensor:
    """Return the shares of the filtered rows, zero for what top-k, top-p and min-p leave out."""
    ordered, tokens = shares.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(shares.shape[1], device=shares.device)
    ordered = ordered.double() * (rank < rules.top_k)
    before = ordered.cumsum(-1) - ordered
    kept = (before < rules.top_p * ordered.sum(-1, keepdim=True)) & (ordered >= rules.min_p * ordered[:, :1])
    kept |= rank == 0
    return shares * torch.zeros_like(kept).scatter_(1, tokens, kept)


def _logprobs(shares: Tensor, sums: Tensor, tokens: Tensor) -> Tensor:
    """Return the logarithm of the share of a token of each row, [B, 1], among all that are summed: [B]."""
    return (shares.gather(1, tokens).squeeze(1) / sums.sum(-1)).log_().float()
