"""From logits to tokens: random numbers, what narrows a distribution, and the sampler of a batch.

Owns: the order of what narrows a distribution (that of transformers) and the random numbers. Must not know: models or
engines. Imported by vLLM's processes, too, so it needs torch alone.

Invariants: a row's token and logprobs depend on its own logits, parameters and random number only. The random number of
a token is a hash of (seed, prompt, sample, position), so it does not matter which worker samples a rollout, when,
in which batch, or how often after a crash. The hash is splitmix64's finaliser (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, 2014).

On a CPU `sample` runs as TorchScript, see `rallypoint.cpu.script`.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch._jit_internal import is_scripting
from torch.nn import functional

from rallypoint.config.limits import SAMPLED_BLOCK
from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.cpu.script import without_python
from rallypoint.generation.protocol import Request, SamplingParams

_CHUNK_BYTES = 2**20
"""Size of the float64 numbers that exist at once; more would leave the CPU's cache."""
_NUMBERS_AHEAD = 16
"""Tokens of a row whose random numbers are made at once; at least as many as a backend decodes in one call."""


class SampledTokens(NamedTuple):
    """One token of each row; all are [B]."""

    tokens: Tensor
    """int64."""
    logprobs: Tensor
    """float32: in the whole distribution at the temperature (for temperature 0: at 1), or at that of the policy; NaN
    where logits are not finite."""
    sampled_logprobs: Tensor
    """float32: in the distribution that was drawn from; 0 for temperature 0."""


class SamplingMetadata(NamedTuple):
    """How the tokens of a batch are sampled, as tensors on the device of the logits."""

    temperature: Tensor | None
    """[B, 1] float32, or [1, 1] if all have the same; 1 for greedy rows; None for 1 everywhere."""
    greedy: Tensor | None
    """[n] int64: rows that take the likeliest token; None if no row does."""
    filtered: Tensor | None
    """[n] int64: rows with top-k, top-p or min-p; None if no row has one."""
    top_k: Tensor
    """[n, 1] int64, of the filtered rows, or [1, 1] if all have the same."""
    top_p: Tensor
    """Likewise, float64."""
    min_p: Tensor
    """Likewise, float32."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        """Return the metadata of rows with these parameters."""
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


class RawLogits(NamedTuple):
    """What the policy says, before penalties and bans and at its own temperature, where tokens are drawn otherwise."""

    rows: Tensor
    """[n] int64."""
    logits: Tensor
    """[n, V]."""
    temperature: Tensor
    """[n, 1] float32."""


def sample(logits: Tensor, metadata: SamplingMetadata, numbers: Tensor, raw: RawLogits | None = None) -> SampledTokens:
    """Draw one token per row, or take the likeliest where the temperature is 0.

    The token is where the cumulative distribution passes the random number. It is summed in float64,
    so that a token is drawn as often as its probability says, also in a vocabulary of 150k.

    Args:
        logits: [B, V], any float type.
        metadata: of the rows.
        numbers: [B] float64 in [0, 1).
        raw: what the policy says of the rows with penalties, bans, or a temperature of their own.
    """
    return SampledTokens(*without_python(sample_tokens, logits.device)(logits, metadata, numbers, raw))


def sample_tokens(
    logits: Tensor, metadata: SamplingMetadata, numbers: Tensor, raw: RawLogits | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `sample` does, in Python; return a tuple, of which TorchScript makes no class of its own."""
    filtered, greedy = metadata.filtered, metadata.greedy
    whole = _shares(logits, metadata.temperature)
    total = _block_sums(whole)
    shares, sums = whole, total
    if filtered is not None:
        kept = _cut(shares.index_select(0, filtered), metadata)
        shares = shares.index_copy(0, filtered, kept)
        sums = sums.index_copy(0, filtered, _block_sums(kept))
    tokens = _invert(shares, sums, numbers).clamp_(max=logits.shape[1] - 1)  # a row of NaN has no token
    if greedy is not None:
        tokens[greedy] = logits.index_select(0, greedy).argmax(-1)
    chosen = tokens.unsqueeze(1)
    logprobs = _logprobs(whole, total, chosen)
    if raw is None and filtered is None and greedy is None:
        return tokens, logprobs, logprobs
    if raw is not None:  # a token sampled there may have a probability that underflows
        own = _scaled(raw.logits, raw.temperature).log_softmax(-1).gather(1, chosen.index_select(0, raw.rows))
        logprobs = logprobs.index_copy(0, raw.rows, own.squeeze(1))
    sampled = _logprobs(shares, sums, chosen)
    if greedy is not None:
        sampled[greedy] = torch.where(logprobs[greedy].isnan(), float("nan"), 0.0)
    return tokens, logprobs, sampled


def policy_temperature(params: Sequence[SamplingParams], device: torch.device) -> Tensor:
    """Return the temperature of each row's logprobs: [n, 1] float32."""
    heats = [[one.policy_temperature or one.temperature or 1.0] for one in params]
    return torch.tensor(heats, dtype=torch.float32, device=device)


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Return logits [B, V] in which the tokens that a row already has are less likely (arXiv 1909.05858).

    >>> penalise(torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0, 1, 1]]), torch.tensor([[2.0]]))
    tensor([[ 1., -4.,  1.]])

    Args:
        logits: [B, V].
        seen: [B, L] int64, token ids; repetitions count once.
        penalty: [B, 1] float32.
    """
    chosen = logits.gather(1, seen)
    return logits.scatter(1, seen, torch.where(chosen > 0, chosen / penalty, chosen * penalty).to(logits.dtype))


def _scaled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Return logits in float32, at the temperature."""
    return logits.float() if temperature is None else logits.float() / temperature


def _shares(logits: Tensor, temperature: Tensor | None, block: int = SAMPLED_BLOCK) -> Tensor:
    """Return the probabilities of all tokens, padded with zeros: [B, V] -> [B, blocks * 256] float32."""
    shares = _scaled(logits, temperature).softmax(-1)
    padding = -shares.shape[1] % block
    return functional.pad(shares, (0, padding)) if padding else shares


def _block_sums(shares: Tensor, block: int = SAMPLED_BLOCK, chunk_bytes: int = _CHUNK_BYTES) -> Tensor:
    """[B, blocks * 256] -> [B, blocks] float64."""
    # Kernels of accelerators convert while they sum.
    if not is_scripting() and not computes_in_pieces(shares.device):
        return shares.view(len(shares), -1, block).sum(-1, dtype=torch.float64)
    rows_at_once = min(len(shares), max(1, chunk_bytes // (8 * shares.shape[1])))
    room = torch.empty(rows_at_once, shares.shape[1], dtype=torch.float64, device=shares.device)
    sums = [room[: len(part)].copy_(part).view(len(part), -1, block).sum(-1) for part in shares.split(rows_at_once)]
    return torch.cat(sums) if len(sums) != 1 else sums[0]


def _invert(shares: Tensor, sums: Tensor, numbers: Tensor, block: int = SAMPLED_BLOCK) -> Tensor:
    """Return the first token at which the cumulative share exceeds the row's number: first its block, then itself."""
    cumulative = sums.cumsum(-1)
    target = numbers.unsqueeze(1) * cumulative[:, -1:]
    found = _first_above(cumulative, target)
    within = shares.view(len(shares), -1, block).gather(1, found.unsqueeze(2).expand(-1, 1, block)).squeeze(1)
    before = (cumulative - sums).gather(1, found)
    return (found * block + _first_above(within.double().cumsum(-1), target - before)).squeeze(1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index at which a cumulative sum exceeds its target, [B, 1]; never one that adds nothing."""
    # Rounding may push the target below all, or onto the end.
    end = cumulative[:, -1:]
    below_end = torch.nextafter(end, torch.zeros_like(end))
    found = torch.searchsorted(cumulative, torch.minimum(target.clamp(min=0.0), below_end), right=True)
    # In a row of NaN it is after the last index.
    return found.clamp_(max=cumulative.shape[1] - 1)


def _cut(shares: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the shares of the filtered rows, 0 for tokens that top-k, top-p or min-p leave out."""
    ordered, tokens = shares.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(shares.shape[1], device=shares.device)
    ordered = ordered.double() * (rank < metadata.top_k)
    before = ordered.cumsum(-1) - ordered
    kept = (before < metadata.top_p * ordered.sum(-1, keepdim=True)) & (ordered >= metadata.min_p * ordered[:, :1])
    kept |= rank == 0
    return shares * torch.zeros_like(kept).scatter_(1, tokens, kept)


def _logprobs(shares: Tensor, sums: Tensor, tokens: Tensor) -> Tensor:
    """Return the logarithm of the share of one token of each row, [B, 1], in the sums of its row: [B]."""
    return (shares.gather(1, tokens).squeeze(1) / sums.sum(-1)).log_().float()


class Sampler:
    """Samples a token for each row of a batch, step after step."""

    def __init__(self, rows: Sequence[tuple[Request, Sequence[int]]], device: torch.device) -> None:
        """Take the requests of the batch, each with its response so far."""
        requests = [request for request, _ in rows]
        self._params = [request.params for request in requests]
        self.metadata = SamplingMetadata.of(self._params, device)
        self._keys = rollout_keys(
            torch.tensor([request.params.seed for request in requests]),
            torch.tensor([request.prompt_index for request in requests]),
            torch.tensor([request.sample_index for request in requests]),
        ).to(device)
        self._positions = torch.tensor([len(response) for _, response in rows], device=device)
        self._numbers = torch.empty(0, len(rows), dtype=torch.float64, device=device)
        """[n, B]: random numbers of the next tokens."""
        penalised = [row for row, params in enumerate(self._params) if params.repetition_penalty != 1]
        self._penalised = torch.tensor(penalised, device=device) if penalised else None
        if penalised:
            seen = [(*rows[row][0].tokens, *rows[row][1]) for row in penalised]
            longest = max(map(len, seen))
            # Repetitions count once, so rows are padded with their own first token.
            filled = [[*tokens, *([tokens[0]] * (longest - len(tokens)))] for tokens in seen]
            self._seen = torch.tensor(filled, device=device)
            self._penalty = torch.tensor(
                [[self._params[row].repetition_penalty] for row in penalised], device=device, dtype=torch.float32
            )
        # Rows below their minimum length, with the number of tokens that they still need.
        self._bans = {
            row: params.min_new_tokens - len(rows[row][1])
            for row, params in enumerate(self._params)
            if params.stop_tokens and params.min_new_tokens > len(rows[row][1])
        }
        self._find_changed()

    @property
    def is_stateless(self) -> bool:
        """Whether how the next token is sampled follows from its logits and `metadata`."""
        return self._changed is None

    def numbers(self, num_tokens: int) -> Tensor:
        """Take the random numbers of the next tokens of every row: [tokens, B]."""
        if len(self._numbers) < num_tokens:
            coming = self._positions + torch.arange(_NUMBERS_AHEAD, device=self._positions.device).unsqueeze(1)
            self._numbers = torch.cat([self._numbers, uniform(self._keys, coming)])
            self._positions += _NUMBERS_AHEAD
        numbers, self._numbers = self._numbers.split([num_tokens, len(self._numbers) - num_tokens])
        return numbers

    def sample(self, logits: Tensor) -> SampledTokens:
        """Sample the next token of every row: [B, V] -> [B]."""
        adjusted, raw = logits, None
        if self._changed is not None:
            # Only these rows: the logprobs of the others must not depend on them.
            raw = RawLogits(self._changed, logits.index_select(0, self._changed), self._policy_temperature)
        if self._penalised is not None:
            chosen = logits.index_select(0, self._penalised).float()
            adjusted = logits.float().index_copy(0, self._penalised, penalise(chosen, self._seen, self._penalty))
        if self._bans:
            adjusted = adjusted.clone()
            for row in self._bans:
                adjusted[row, list(self._params[row].stop_tokens)] = float("-inf")
        sampled = sample(adjusted, self.metadata, self.numbers(1)[0], raw)
        if self._penalised is not None:
            self._seen = torch.cat([self._seen, sampled.tokens[self._penalised].unsqueeze(1)], 1)
        if self._bans:
            num_bans = len(self._bans)
            self._bans = {row: left - 1 for row, left in self._bans.items() if left > 1}
            if len(self._bans) != num_bans:
                self._find_changed()
        return sampled

    def _find_changed(self) -> None:
        """Find the rows of which the policy says something else than what the next token is drawn from."""
        changed = [
            row
            for row, one in enumerate(self._params)
            if one.repetition_penalty != 1 or row in self._bans or one.has_own_temperature
        ]
        device = self._positions.device
        self._changed = torch.tensor(changed, device=device) if changed else None
        self._policy_temperature = policy_temperature([self._params[row] for row in changed], device)


def _signed(value: int) -> int:
    """Return the 64 bits as the signed integer that torch holds them in."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift would repeat the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """Hash 64 bits to 64 bits, one to one; int64 products wrap around, as they should."""
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def rollout_keys(seed: int | Tensor, prompt_index: Tensor, sample_index: Tensor) -> Tensor:
    """Return one key for each rollout: one seed for all or [B], [B], [B] -> [B] int64."""
    key = _mix(torch.zeros_like(prompt_index) + seed + _GOLDEN)
    key = _mix((key ^ prompt_index) + _GOLDEN)
    return _mix((key ^ sample_index) + _GOLDEN)


def uniform(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return a number in [0, 1) for each rollout's token at a position of its response: [B] float64.

    The position is the same for all, or [B] int64.

    >>> keys = rollout_keys(0, torch.tensor([3, 4]), torch.tensor([0, 0]))
    >>> both, alone = uniform(keys, 7), uniform(keys[1:], 7)
    >>> bool(both[1] == alone[0])
    True
    """
    step = torch.as_tensor(position + 1, device=keys.device) * _GOLDEN
    return _shifted(_mix(keys + step), 11).to(torch.float64) * 2.0**-53
