"""Keys and values of rows that are being sampled: prompts once per group, responses once per row.

Everything is stored for P prompts with G rollouts each, B = P*G rows, prompt-major. A decode step sends
one token of every row through the model; the attention of a row looks at its prompt (shared by the
group: the G queries are rows of one product) and at its own response so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.models import PackedRows
from rallypoint.models.attention import NO_LIMITS, Limits
from rallypoint.models.head import soft_capped


class PrefillRows(PackedRows):
    """A packed pass over prompts that keeps every layer's keys and values."""

    def __init__(self, offsets: Tensor, device: torch.device) -> None:
        super().__init__(offsets, device)
        self.keys_and_values: list[tuple[Tensor, Tensor]] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        assert layer == len(self.keys_and_values), "layers must be called in order"
        self.keys_and_values.append((key, value))
        return super().attend(layer, query, key, value, scaling, limits)


class DecodeRows:
    """One token of each row, attending to its cached past."""

    def __init__(self, prefill: PrefillRows, offsets: Tensor, group_size: int, max_new_tokens: int) -> None:
        lengths = offsets[1:] - offsets[:-1]
        device = prefill.position_ids.device
        longest = int(lengths.max())
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        slots = (row * longest + prefill.position_ids[0].cpu()).to(device)
        self.group_size = group_size
        self.num_decoded = 0
        self._prompt_lengths = lengths.to(device)
        self._prompts: list[tuple[Tensor, Tensor]] = []
        self._responses: list[tuple[Tensor, Tensor]] = []
        for key, value in prefill.keys_and_values:
            heads, dim = key.shape[1:]
            self._prompts.append(
                tuple(_rectangle(states, slots, len(lengths), longest) for states in (key, value))  # pyright: ignore
            )
            room = (len(lengths) * group_size, heads, max_new_tokens, dim)
            self._responses.append((key.new_zeros(room), value.new_zeros(room)))
        self._hidden = torch.arange(longest, device=device) >= self._prompt_lengths.unsqueeze(1)
        self._some_hidden = bool(self._hidden.any())

    @property
    def position_ids(self) -> Tensor:
        """[1, B]: the position of the token that each row decodes now."""
        return (self._prompt_lengths.repeat_interleave(self.group_size) + self.num_decoded).unsqueeze(0)

    def keep(self, prompts: Tensor) -> None:
        """Forget all but these prompts and their rollouts, which frees memory and work."""
        within = torch.arange(self.group_size, device=prompts.device)
        rows = (prompts.unsqueeze(1) * self.group_size + within).flatten()
        self._prompts = [(k.index_select(0, prompts), v.index_select(0, prompts)) for k, v in self._prompts]
        self._responses = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self._responses]
        self._prompt_lengths = self._prompt_lengths[prompts]
        self._hidden = self._hidden[prompts]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`; T is B here, one token a row."""
        num_rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        num_prompts, share = num_rows // self.group_size, heads // kv_heads
        prompt_keys, prompt_values = self._prompts[layer]
        keys, values = self._responses[layer]
        keys[:, :, self.num_decoded] = key
        values[:, :, self.num_decoded] = value
        length = self.num_decoded + 1
        first = 0 if limits.window is None else max(0, length - limits.window)

        # [P, K, G*share, D]: all queries that look at one prompt through one key/value head.
        by_prompt = query.view(num_prompts, self.group_size, kv_heads, share, dim).transpose(1, 2)
        by_prompt = by_prompt.reshape(num_prompts, kv_heads, self.group_size * share, dim)
        by_row = query.view(num_rows, kv_heads, share, dim)
        to_prompt = soft_capped((by_prompt @ prompt_keys.transpose(-1, -2)) * scaling, limits.softcap)
        hidden = self._hidden_prompt(limits.window)
        if hidden is not None:
            to_prompt = to_prompt.masked_fill(hidden[:, None, None, :], float("-inf"))
        to_response = soft_capped((by_row @ keys[:, :, first:length].transpose(-1, -2)) * scaling, limits.softcap)

        # Bring both to [B, K, share, *] for one softmax over the whole past.
        to_prompt = to_prompt.view(num_prompts, kv_heads, self.group_size, share, -1).transpose(1, 2)
        to_prompt = to_prompt.reshape(num_rows, kv_heads, share, -1)
        weights = torch.cat([to_prompt, to_response], dim=-1).softmax(-1)
        for_prompt, for_response = weights.split([to_prompt.shape[-1], length - first], dim=-1)

        for_prompt = for_prompt.reshape(num_prompts, self.group_size, kv_heads, share, -1).transpose(1, 2)
        from_prompt = for_prompt.reshape(num_prompts, kv_heads, self.group_size * share, -1) @ prompt_values
        from_prompt = from_prompt.view(num_prompts, kv_heads, self.group_size, share, dim).transpose(1, 2)
        from_response = for_response @ values[:, :, first:length]
        return (from_prompt.reshape(num_rows, kv_heads, share, dim) + from_response).reshape(num_rows, heads, dim)

    def _hidden_prompt(self, window: int | None) -> Tensor | None:
        """Return which tokens of the prompts are not seen, [P, L]; None if all are."""
        if window is None:
            return self._hidden if self._some_hidden else None
        last_hidden = (self._prompt_lengths + self.num_decoded - window).unsqueeze(1)
        return self._hidden | (torch.arange(self._hidden.shape[1], device=last_hidden.device) <= last_hidden)


def _rectangle(states: Tensor, slots: Tensor, num_rows: int, longest: int) -> Tensor:
    """[T, K, D] -> [P, K, L, D], zero behind the end of shorter prompts."""
    room = states.new_zeros(num_rows * longest, *states.shape[1:])
    room.index_copy_(0, slots, states)
    return room.view(num_rows, longest, *states.shape[1:]).transpose(1, 2).contiguous()
