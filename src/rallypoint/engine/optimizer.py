"""AdamW with a learning-rate schedule that is a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rallypoint.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Return the rate of a training step, counted from 1.

    Linear up to `lr` over the first `warmup_ratio` of the steps, then constant, or from `lr` down towards
    `min_lr_ratio`, which would be reached one step after the last: the last step still counts.

    >>> config = OptimizerConfig(lr=1.0, schedule="linear", warmup_ratio=0.3)
    >>> [learning_rate(config, step, num_steps=6) for step in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    num_warmup_steps = round(config.warmup_ratio * num_steps)
    if step <= num_warmup_steps:
        return config.lr * step / num_warmup_steps
    progress = min(1.0, (step - 1 - num_warmup_steps) / max(1, num_steps - num_warmup_steps))
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay)


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over a model's weights; decay is for matrices only, as is usual."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of every weight under `weight/what`, such as `lm_head.weight/exp_avg`."""
    return {
        f"{name}/{what}": value
        for name, weight in model.named_parameters()
        for what, value in optimizer.state.get(weight, {}).items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` returned; nothing stays of the state before.

    Raises:
        ValueError: the state is of another model; what differs is listed.
    """
    weights = dict(model.named_parameters())
    shapes = {
        f"{name}/{what}": shape
        for name, weight in weights.items()
        for what, shape in (("step", ()), ("exp_avg", weight.shape), ("exp_avg_sq", weight.shape))
    }
    wrong = [
        *(f"unknown {name}" for name in sorted(set(tensors) - set(shapes))),
        *(f"lacking {name}" for name in sorted(set(shapes) - set(tensors)) if tensors),
        *(
            f"{name}: {list(value.shape)} instead of {list(shapes[name])}"
            for name, value in tensors.items()
            if name in shapes and tuple(value.shape) != tuple(shapes[name])
        ),
    ]
    if wrong:
        raise ValueError(f"optimizer state of another model: {', '.join(wrong[:5])}")
    optimizer.state.clear()
    for name, value in tensors.items():
        weight_name, _, what = name.rpartition("/")
        weight = weights[weight_name]
        optimizer.state[weight][what] = value.to(weight.device, copy=True)
