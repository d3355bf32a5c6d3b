"""What a run with rollout.engine=vllm cannot have; see `check.py`."""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.config.problem import Problem
from rallypoint.config.shape import shape_of
from rallypoint.config.tree import RunConfig

_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's attention on processors."""

MOST_VLLM_RANK = 512
"""Of the adapters that vLLM takes."""


def vllm_contradictions(config: RunConfig) -> Iterator[Problem]:
    """Yield what stands against the engine; nothing for another one."""
    if config.rollout.engine != "vllm":
        return
    if config.rollout.exact:
        yield Problem(
            ("rollout.exact", "rollout.engine"),
            "rollout.exact=true is for our own engine: with rollout.engine=vllm logits depend on the company by their "
            "last bits; use rollout.engine=native",
        )
    if config.model.lora is not None and config.model.lora.rank > MOST_VLLM_RANK:
        yield Problem(
            ("model.lora.rank", "rollout.engine"),
            f"model.lora.rank={config.model.lora.rank} is more than rollout.engine='vllm' has room for; expected at "
            f"most {MOST_VLLM_RANK}, or rollout.engine=native",
        )
    if config.rollout.weights not in ("auto", "folder"):
        yield Problem(
            ("rollout.weights", "rollout.engine"),
            f"rollout.weights={config.rollout.weights!r} ends in a process of ours: with rollout.engine=vllm weights "
            "take the way `folder`; leave it at auto",
        )
    shape = shape_of(config)
    if shape is not None and config.cluster.device == "cpu" and shape.head_dim not in _CPU_HEAD_DIMS:
        made, fits = config.model.create, ", ".join(map(str, _CPU_HEAD_DIMS))
        remedy = "use rollout.engine=native"
        if made is not None and (num_heads := made.hidden_size // 32) and made.hidden_size % 32 == 0:
            remedy += f", or model.create.num_heads={num_heads} model.create.num_key_value_heads={num_heads}"
        yield Problem(
            ("rollout.engine", "cluster.device", "model.create.num_heads"),
            f"rollout.engine='vllm' with cluster.device=cpu: the model's heads are {shape.head_dim} wide, and vLLM on "
            f"processors knows {fits} only; {remedy}",
        )
