"""AdamW in float32 at least, and a learning-rate schedule that is a pure function of the step.

Owns: the optimizer's state of every weight, its precision, and where it lies between steps. Must not know: losses,
ranks, files. Invariants: a weight of half precision always is its float32 master, rounded; and where the state lies
changes no bit.

An offloaded state lies in page-locked CPU memory. A step then goes over the weights in parts: masters and moments of a
part come to the device, are stepped, and go back before those of the next part come. Offloaded gradients lie there too:
a backward pass adds each one to that of earlier passes as soon as it is there, and they come back with their part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rallypoint.config import OptimizerConfig
from rallypoint.config.limits import OPTIMIZER_BYTES
from rallypoint.config.sections.learning import Offload

_MASTER = "master"
_SUMMED_BYTES = OPTIMIZER_BYTES // 4
"""Bytes of an offloaded gradient that are on the device at once, while a backward pass adds to it."""


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


class AdamW(torch.optim.AdamW):
    """torch's AdamW, with a float32 master for every weight of half precision.

    A step of 1e-6 is less than half the distance between neighbouring bfloat16 numbers of an ordinary size, and would
    vanish. So backward passes add their gradients up in `master.grad`, the step is taken on the masters, and the
    weights become the masters, rounded. Wider weights are their own masters: they have no second copy.

    >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = AdamW([{"params": [weight]}], lr=0.001, weight_decay=0.0)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     weight.sum().backward()
    ...     optimizer.step()
    >>> optimizer.master(weight), weight
    (Parameter containing:
    tensor([0.9970], requires_grad=True), Parameter containing:
    tensor([0.9961], dtype=torch.bfloat16, requires_grad=True))
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        are_masters: bool = False,
        offload: Offload = "nothing",
        agree: Callable[[Tensor], None] | None = None,
        **options: Any,
    ) -> None:
        """Take weights over: from now on the gradients of those of half precision go to their masters.

        Args:
            groups: as torch has them, of the model's weights.
            are_masters: whether these are the masters already, of a model that computes in half precision.
            offload: what lies in CPU memory between steps: masters and moments; or gradients, too, also between passes.
            agree: sets sizes to the largest of any rank of `tp`, so that all cut their gradients into the same parts.
            **options: torch's own.
        """
        groups = list(groups)
        self._are_masters, self._offloads = are_masters, offload != "nothing"
        self._away: dict[Tensor, Tensor] = {}
        """Master -> its numbers in CPU memory, while it has no memory of its own."""
        self._places: dict[tuple[Tensor, str], Tensor] = {}
        """(master, what) -> CPU memory that belongs to it, as long as it is on the device."""
        self._masters: dict[Tensor, nn.Parameter] = {}
        self.gradients_stay = offload != "optimizer_and_gradients"
        """Whether gradients stay on the device."""
        self._gradients: dict[Tensor, Tensor] = {}
        """Master -> CPU memory for its gradient."""
        self._summed: set[Tensor] = set()
        """Masters that have a gradient there."""
        for weight in (weight for group in groups for weight in group["params"]):
            if torch.finfo(weight.dtype).bits < 32:
                self._masters[weight] = master = nn.Parameter(weight.detach().float())
                if self._offloads:
                    self._take_away(master)
            if not self.gradients_stay or weight in self._masters:
                weight.register_post_accumulate_grad_hook(self._takes_gradient)
        super().__init__([{**group, "params": list(map(self.master, group["params"]))} for group in groups], **options)
        sizes = torch.tensor([master.nbytes for master in self.masters], dtype=torch.int64)
        if agree is not None and not self.gradients_stay:
            agree(sizes)
        self._sizes = dict(zip(self.masters, sizes.tolist(), strict=True))

    @property
    def masters(self) -> list[Tensor]:
        """Tensors that are stepped, with the gradients of the step in `grad`."""
        return [master for group in self.param_groups for master in group["params"]]

    @property
    def tensors(self) -> list[Tensor]:
        """What it holds on the device in addition to the model's weights: masters and moments."""
        if self._offloads:
            return []
        moments = [value for state in self.state.values() for value in state.values() if value.dim()]
        return [*self._masters.values(), *moments]

    def master(self, weight: Tensor) -> Tensor:
        """Return what is stepped for a weight: the weight itself, unless it is of half precision."""
        return self._masters.get(weight, weight)

    def values_of(self, weight: Tensor) -> Tensor:
        """Return the numbers of a weight's master, which may lie in CPU memory."""
        master = self.master(weight)
        return self._away.get(master, master.detach())

    def has_master(self, weight: Tensor) -> bool:
        """Return whether what is stepped is a float32 master of this weight."""
        return self._are_masters or weight in self._masters

    def step(self, closure: None = None) -> None:
        """Step the masters, and round them into the weights."""
        if not self._offloads:
            super().step(closure)
            self._round(self.masters)
            return
        groups = self.param_groups
        try:
            for part in self._parts():
                self._fetch(part)
                own = {id(master) for master in part}
                chosen = [{**group, "params": [one for one in group["params"] if id(one) in own]} for group in groups]
                self.param_groups = [group for group in chosen if group["params"]]
                super().step(closure)
                self._round(part)
                self._put_away(part)
                if not self.gradients_stay:
                    super().zero_grad()
        finally:
            self.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch's own."""
        super().zero_grad(set_to_none or not self.gradients_stay)
        self._summed.clear()

    def gradient_parts(self, weights: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Yield what is stepped for weights that are trained, by name, with gradients that the caller may change.

        All at once, or in parts whose gradients are on the device only until the next part is asked for.
        """
        names = {self.master(weight): name for name, weight in weights.items() if weight.requires_grad}
        if self.gradients_stay:
            yield {name: master for master, name in names.items()}
            return
        for part in self._parts():
            self._fetch_gradients(part)
            yield {names[master]: master for master in part}
            for master in part:
                if master.grad is not None:
                    self._sum_away(master, master.grad, is_first=True)
                master.grad = None

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything, masters included: the weights as they are now are where training starts."""
        self.state.clear()
        for weight in self._masters:
            self.values_of(weight).copy_(weight)

    @torch.no_grad()
    def put(self, weight: Tensor, what: str, value: Tensor) -> None:
        """Take over a copy of one tensor of a weight's state, as `optimizer_tensors` names it."""
        master = self.master(weight)
        if what == _MASTER:
            self.values_of(weight).copy_(value)
        elif self._offloads and value.dim():
            self.state[master][what] = _page_locked_like(master, value.dtype).copy_(value, non_blocking=True)
        else:
            self.state[master][what] = value.to(master.device, copy=True)

    @torch.no_grad()
    def _round(self, masters: Sequence[Tensor]) -> None:
        """Give weights of half precision what their masters are now."""
        stepped = {id(master) for master in masters}
        for weight, master in self._masters.items():
            if id(master) in stepped:
                weight.copy_(master)

    def _parts(self) -> Iterator[Sequence[Tensor]]:
        """Yield masters that are on the device together: `OPTIMIZER_BYTES` of them, or one that is larger."""
        part = list[Tensor]()
        for master in self.masters:
            if part and sum(self._sizes[one] for one in (*part, master)) > OPTIMIZER_BYTES:
                yield part
                part = []
            part.append(master)
        yield part

    @torch.no_grad()
    def _fetch(self, masters: Sequence[Tensor]) -> None:
        """Bring the state of some masters to the device, and their gradients."""
        self._fetch_gradients(masters)
        for master in masters:
            if (values := self._away.pop(master, None)) is not None:
                master.untyped_storage().resize_(values.nbytes)
                master.copy_(values, non_blocking=True)
                self._places[master, _MASTER] = values
            for what, value in self.state[master].items():
                if value.dim():
                    self._places[master, what] = value
                    self.state[master][what] = value.to(master.device, non_blocking=True, copy=True)

    @torch.no_grad()
    def _put_away(self, masters: Sequence[Tensor]) -> None:
        """Move the state of some masters to CPU memory, and wait until it is there."""
        copied = {id(master) for master in self._masters.values()}
        for master in masters:
            if id(master) in copied:
                self._take_away(master)
            for what, value in self.state[master].items():
                if value.dim():
                    self.state[master][what] = self._moved(master, what, value)
        for device in {master.device for master in masters if master.device.type != "cpu"}:
            torch.accelerator.synchronize(device)

    @torch.no_grad()
    def _fetch_gradients(self, masters: Sequence[Tensor]) -> None:
        for master in masters:
            if master in self._summed:
                master.grad = self._gradients[master].to(master.device, non_blocking=True, copy=True)

    @torch.no_grad()
    def _takes_gradient(self, weight: Tensor) -> None:
        """Take the gradient of a weight as soon as a backward pass has it, and add it to that of earlier passes."""
        assert weight.grad is not None, "a weight has one optimizer"
        master, gradient, weight.grad = self.master(weight), weight.grad, None
        if not self.gradients_stay:
            self._sum_away(master, gradient, is_first=master not in self._summed)
        elif master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad += gradient

    @torch.no_grad()
    def _sum_away(self, master: Tensor, gradient: Tensor, *, is_first: bool) -> None:
        """Add to a gradient in CPU memory, or put the first one there, a piece at a time; nothing waits for it."""
        if master not in self._gradients:
            self._gradients[master] = _page_locked_like(gradient, master.dtype)
        self._summed.add(master)
        size = max(1, _SUMMED_BYTES // master.dtype.itemsize)
        for place, piece in zip(
            self._gradients[master].flatten().split(size), gradient.flatten().split(size), strict=True
        ):
            place.copy_(piece if is_first else piece + place.to(piece.device, non_blocking=True), non_blocking=True)

    def _take_away(self, master: Tensor) -> None:
        self._away[master] = self._moved(master, _MASTER, master.detach())
        master.untyped_storage().resize_(0)

    def _moved(self, master: Tensor, what: str, value: Tensor) -> Tensor:
        """Copy a value to the CPU memory that belongs to it, and return that."""
        place = self._places.pop((master, what), None)
        place = _page_locked_like(value, value.dtype) if place is None else place
        return place.copy_(value, non_blocking=True)


def _page_locked_like(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return CPU memory for a tensor, which its accelerator can read and write by itself."""
    return torch.empty(value.shape, dtype=dtype, pin_memory=value.device.type != "cpu")


def make_optimizer(
    weights: Mapping[str, Tensor],
    config: OptimizerConfig,
    *,
    eps: float,
    are_masters: bool = False,
    offload: Offload = "nothing",
    agree: Callable[[Tensor], None] | None = None,
) -> AdamW:
    """Return AdamW (see its arguments) over those weights that are trained; decay is for matrices only, as is usual."""
    trained = [weight for weight in weights.values() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in trained if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=eps,
        fused=True,
        are_masters=are_masters,
        offload=offload,
        agree=agree,
    )


def optimizer_tensors(weights: Mapping[str, Tensor], optimizer: AdamW) -> dict[str, Tensor]:
    """Return the state of every weight under `weight/what`, such as `lm_head.weight/exp_avg`.

    What is `step`, `exp_avg`, `exp_avg_sq`, and `master` for a weight of half precision; nothing before the first step.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        master = optimizer.master(weight)
        state = optimizer.state.get(master, {})
        tensors |= {f"{name}/{what}": value for what, value in state.items()}
        if state and optimizer.has_master(weight):
            tensors[f"{name}/{_MASTER}"] = optimizer.values_of(weight)
    return tensors


def restore_optimizer(weights: Mapping[str, Tensor], optimizer: AdamW, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` returned, after the weights; nothing stays of the state before.

    Raises:
        ValueError: the state is of another model; what differs is listed.
    """
    weights = {name: weight for name, weight in weights.items() if weight.requires_grad}
    expected: dict[str, torch.Size] = {}
    for name, weight in weights.items():
        whole = ("exp_avg", "exp_avg_sq", *((_MASTER,) if optimizer.has_master(weight) else ()))
        expected |= {f"{name}/step": torch.Size(()), **{f"{name}/{what}": weight.shape for what in whole}}
    wrong = [
        *(f"unknown {name}" for name in sorted(set(tensors) - set(expected))),
        *(f"lacking {name}" for name in sorted(set(expected) - set(tensors)) if tensors),
        *(
            f"{name}: {list(value.shape)} instead of {list(expected[name])}"
            for name, value in tensors.items()
            if name in expected and value.shape != expected[name]
        ),
    ]
    if wrong:
        raise ValueError(f"optimizer state of another model: {', '.join(wrong[:5])}")
    optimizer.reset()
    for name, value in tensors.items():
        weight_name, _, what = name.rpartition("/")
        optimizer.put(weights[weight_name], what, value)
