"""What flash-linear-attention exports, for machines without a GPU: the recurrence token by token, which notes calls."""

import itertools
from typing import Any

import torch
from torch import Tensor

calls: list[dict[str, Any]] = []


def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    """[1, T, H, D] each -> [1, T, H, Dv]; rows begin without a state at `cu_seqlens`."""
    calls.append({"q": q, "k": k, "v": v, **options})
    kind = torch.promote_types(q.dtype, torch.float32)
    query, key, value, decay, strength = (x[0].to(kind) for x in (q, k, v, options["g"], options["beta"]))
    outs: list[Tensor] = []
    borders = options["cu_seqlens"].tolist()
    for start, end in itertools.pairwise(borders):
        memory = query.new_zeros(query.shape[1], query.shape[2], value.shape[2])
        for token in range(start, end):
            memory = memory * decay[token].exp()[:, None, None]
            wrong = value[token] - (key[token].unsqueeze(1) @ memory).squeeze(1)
            memory = memory + key[token].unsqueeze(2) * (strength[token].unsqueeze(1) * wrong).unsqueeze(1)
            outs.append((query[token].unsqueeze(1) @ memory).squeeze(1) * options["scale"])
    return torch.stack(outs).to(v.dtype).unsqueeze(0), None
