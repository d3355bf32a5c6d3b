"""What the model of a server looks like, without its weights."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rallypoint.errors import GenerationError
from rallypoint.families import FAMILIES
from rallypoint.generation.protocol import Output
from rallypoint.generation.requests import vocabulary_size
from rallypoint.model_files.pieces import Sources
from rallypoint.model_files.tensor_names import sources_of
from rallypoint.models import ModelShard, named_weights
from rallypoint.models.kinds.experts import Router, routers_of
from rallypoint.models.kinds.router_replay import written


@dataclasses.dataclass(frozen=True, slots=True)
class Outline:
    """Names, shapes and types of a model's weights, and its vocabulary."""

    weights: Mapping[str, Tensor]
    """By name; may be on the meta device."""
    sources: Sources
    """Their names in files."""
    num_ids: int
    """Size of the vocabulary."""
    cache_bytes_per_token: int
    """Bytes of the keys and values of one token, or of the latents that they are made of."""
    num_cache_heads: int
    """Heads of keys and values, which devices can have apart; 1 of latents."""
    routers: Mapping[int, Router] = dataclasses.field(default_factory=dict[int, Router])
    """Routers of a mixture by the number of their layer."""

    def num_bytes(self, quantization: Literal["fp8"] | None = None) -> int:
        """Return the size of all weights in a server, which makes those of layers smaller if it quantises them."""
        outside = ("embed_tokens.weight", "lm_head.weight")
        return sum(
            weight.numel()
            * (1 if quantization and weight.dim() > 1 and not name.endswith(outside) else weight.itemsize)
            for name, weight in self.weights.items()
        )

    @classmethod
    def of(cls, shard: ModelShard) -> Outline:
        """Return the outline of a model, which may be on the meta device."""
        model, config = shard.model, shard.model.config.get_text_config()
        family = FAMILIES.get(str(config.model_type))
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        numbers = 2 * num_heads * head_dim
        if family is not None and family.has_latents:
            num_heads, numbers = 1, config.kv_lora_rank + config.qk_rope_head_dim
        per_token = numbers * config.num_hidden_layers * next(model.parameters()).dtype.itemsize
        routers = dict(_routers(model))
        return cls(named_weights(model), sources_of(model), vocabulary_size(model), per_token, num_heads, routers)

    def with_experts(self, outputs: Sequence[Output], num_prompt_tokens: int, read: bytes) -> list[Output]:
        """Return the outputs of a whole response with the experts before each token, as they are recorded.

        Args:
            outputs: of the response.
            num_prompt_tokens: of its prompt.
            read: see `client.Answer.experts`.

        Raises:
            GenerationError: these are of another model, or of fewer tokens, or no array.
        """
        num_tokens = num_prompt_tokens + sum(len(output.tokens) for output in outputs)
        try:
            chosen = torch.from_numpy(np.load(io.BytesIO(read)).astype(np.int64))[: num_tokens - 1]
        except (ValueError, EOFError) as error:
            raise GenerationError(f"vllm sent experts that cannot be read: {error}") from error
        if chosen.dim() != 3 or len(chosen) != num_tokens - 1 or chosen.shape[1] <= max(self.routers, default=2**31):
            raise GenerationError(f"vllm sent experts of {list(chosen.shape)} for {num_tokens} tokens")
        lines = written(list(self.routers.values()), [chosen[:, layer] for layer in self.routers])
        lines = functional.pad(lines, (0, 0, 1, 0)).numpy()
        found, at = list[Output](), num_prompt_tokens
        for output in outputs:
            found.append(dataclasses.replace(output, experts=lines[at : at + len(output.tokens)].tobytes()))
            at += len(output.tokens)
        return [*found[:-1], dataclasses.replace(found[-1], prompt_experts=lines[:num_prompt_tokens].tobytes())]


def _routers(model: nn.Module) -> Iterator[tuple[int, Router]]:
    """Yield routers with the number of their layer."""
    known = {id(router): router for router in routers_of(model)}
    for name, module in model.named_modules():
        if (router := known.get(id(module))) is not None:
            yield next(int(part) for part in name.split(".") if part.isdigit()), router
