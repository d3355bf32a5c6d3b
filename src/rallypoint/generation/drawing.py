"""How the rows that run together draw their next tokens, as tensors that are made once for as long as they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rallypoint.generation.protocol import Request
from rallypoint.generation.randomness import rollout_keys, uniform
from rallypoint.generation.sampler import Draws, Raw, Rules, penalise, sample

_NUMBERS_AHEAD = 16
"""Tokens of a row whose random numbers are made at once, at least as many as are drawn at once."""


class Drawing:
    """Draws a token for each of some rows, again and again."""

    def __init__(self, rows: Sequence[tuple[Request, Sequence[int]]], device: torch.device) -> None:
        """Begin with requests, each with its response so far."""
        requests = [request for request, _ in rows]
        self._params = [request.params for request in requests]
        self.rules = Rules.of(self._params, device)
        self._keys = rollout_keys(
            torch.tensor([request.params.seed for request in requests]),
            torch.tensor([request.prompt_index for request in requests]),
            torch.tensor([request.sample_index for request in requests]),
        ).to(device)
        self._positions = torch.tensor([len(response) for _, response in rows], device=device)
        self._numbers = torch.empty(0, len(rows), dtype=torch.float64, device=device)
        """[n, B], of the coming tokens."""
        penalised = [row for row, params in enumerate(self._params) if params.repetition_penalty != 1]
        self._penalised = torch.tensor(penalised, device=device) if penalised else None
        if penalised:
            seen = [(*rows[row][0].tokens, *rows[row][1]) for row in penalised]
            longest = max(map(len, seen))
            # What is there twice counts once, so rows are filled up with their own first token.
            filled = [[*tokens, *([tokens[0]] * (longest - len(tokens)))] for tokens in seen]
            self._seen = torch.tensor(filled, device=device)
            self._penalty = torch.tensor(
                [[self._params[row].repetition_penalty] for row in penalised], device=device, dtype=torch.float32
            )
        # Rows that may not end yet, with the number of tokens that they still need.
        self._bans = {
            row: params.min_new_tokens - len(rows[row][1])
            for row, params in enumerate(self._params)
            if params.stop_tokens and params.min_new_tokens > len(rows[row][1])
        }
        self._find_changed()

    @property
    def is_the_same_for_all_tokens(self) -> bool:
        """Whether what a token is drawn from depends on those before it through its logits only."""
        return self._penalised is None and not self._bans

    def numbers(self, num_tokens: int) -> Tensor:
        """Return the random numbers of the next tokens of every row, once: [tokens, B]."""
        if len(self._numbers) < num_tokens:
            coming = self._positions + torch.arange(_NUMBERS_AHEAD, device=self._positions.device).unsqueeze(1)
            self._numbers = torch.cat([self._numbers, uniform(self._keys, coming)])
            self._positions += _NUMBERS_AHEAD
        numbers, self._numbers = self._numbers.split([num_tokens, len(self._numbers) - num_tokens])
        return numbers

    def draw(self, logits: Tensor) -> Draws:
        """Draw the next token of every row: [B, V] -> [B]."""
        adjusted, raw = logits, None
        if self._changed is not None:
            # Of these rows only: what is reported of another one must not depend on their company.
            raw = Raw(self._changed, logits.index_select(0, self._changed))
        if self._penalised is not None:
            chosen = logits.index_select(0, self._penalised).float()
            adjusted = logits.float().index_copy(0, self._penalised, penalise(chosen, self._seen, self._penalty))
        if self._bans:
            adjusted = adjusted.clone()
            for row in self._bans:
                adjusted[row, list(self._params[row].stop_tokens)] = float("-inf")
        draws = sample(adjusted, self.rules, self.numbers(1)[0], raw)
        if self._penalised is not None:
            self._seen = torch.cat([self._seen, draws.tokens[self._penalised].unsqueeze(1)], 1)
        if self._bans:
            num_bans = len(self._bans)
            self._bans = {row: left - 1 for row, left in self._bans.items() if left > 1}
            if len(self._bans) != num_bans:
                self._find_changed()
        return draws

    def _find_changed(self) -> None:
        """Find the rows whose logits are changed before the next token is drawn."""
        changed = [row for row, one in enumerate(self._params) if one.repetition_penalty != 1 or row in self._bans]
        self._changed = torch.tensor(changed, device=self._positions.device) if changed else None
