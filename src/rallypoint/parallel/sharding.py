"""One rank's weights among those of other ranks: shared passes, sums of gradients, and their norm.

Owns: which ranks sum what, and in which order. Must not know: losses, optimizers, models. Every method is called by all
ranks of the mesh in the same order; on a mesh of one rank it does nothing.

    weights of               are cut over    gradients add up over
    any model                dp_shard        dp_shard (within backward), dp_replicate, ep, cp and sp
    experts                  ep, too         dp_shard (within backward), dp_replicate, cp and sp
    a block of a layer       tp              nothing more
    `summed`                 nothing         tp, whose ranks computed them in parts
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rallypoint.errors import PeerFailedError
from rallypoint.parallel.collective import Grouped
from rallypoint.parallel.fsdp import ShardedRoot, held
from rallypoint.parallel.mesh import DeviceMesh

ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorCuts:
    """Weights that tensor and expert parallelism have changed, by name."""

    cut: Collection[str] = ()
    """Weights of which every rank has a part."""
    summed: Collection[str] = ()
    """Weights that every rank has whole, with a gradient in parts."""
    dealt: Collection[str] = ()
    """Weights of experts, of which every rank of `ep` has some."""


class Sharding:
    """One rank's weights among those of a mesh."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        mesh: DeviceMesh,
        cuts: TensorCuts | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        """Shard a model over `dp_shard`, in place; where that has one rank, leave it as it is.

        Args:
            model: on its device or on the meta device; what is trained has to be known by now (`requires_grad`).
            units: modules that are gathered one at a time, in the order in which they run.
            mesh: the ranks.
            cuts: what tensor parallelism has done to it before.
            frozen: whether none of it will ever be trained.
        """
        self._model, self._mesh, self._cuts = model, mesh, cuts or TensorCuts()
        self._root: ShardedRoot | None = None
        self._leaves: dict[str, Tensor] | None = None
        if isinstance(mesh.shard, Grouped):
            self._root = ShardedRoot(model, units, mesh.shard.group, frozen=frozen)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """This rank's part of each weight, as ordinary tensors; read it when the weights have memory.

        Of a sharded model they are leaves of their own, which share the memory and have their own `grad`.
        """
        if self._root is None:
            return dict(self._model.named_parameters())
        # No cached_property: until Python 3.12 it has one lock for all ranks that are threads, and this waits for them.
        if self._leaves is None:
            self._root.settle()
            named = self._model.named_parameters()
            self._leaves = {name: nn.Parameter(held(weight), weight.requires_grad) for name, weight in named}
        return self._leaves

    @property
    def half(self) -> torch.dtype | None:
        """The precision that the model computes in, where `weights` are float32 masters of that; None where not."""
        return None if self._root is None else self._root.half_dtype

    def agree(self, num_passes: int | None) -> int:
        """Return the largest number of passes of the ranks that share them; None says that this rank failed.

        Raises:
            PeerFailedError: another rank failed.
        """
        if self._mesh.passes.size == 1:
            return num_passes or 0
        most = torch.tensor([num_passes or 0, int(num_passes is None)])
        self._mesh.passes.all_reduce_max(most)
        if most[1] and num_passes is not None:
            raise PeerFailedError("another rank cannot make its passes; see its error")
        return int(most[0])

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        """Make a forward pass, in which all weights are there."""
        return call() if self._root is None else self._root.run(call)

    def backward(self, total: Tensor) -> None:
        """Add the gradients of a pass to those of the passes before."""
        if self._root is None:
            total.backward()
        else:
            self._root.backward(total)

    def touch(self) -> Tensor:
        """Return a zero that gives a pass without rows the gradients of a pass with rows."""
        return torch.zeros(()) if self._root is None else self._root.touch()

    def reduce_and_clip(
        self, parts: Callable[[], Iterable[Mapping[str, Tensor]]], max_norm: float, *, stay: bool = True
    ) -> float:
        """Sum gradients over the ranks, clip them to a global norm, and return the norm before clipping.

        Args:
            parts: yields what is stepped, with gradients, all at once or part by part; the names are those of
                `self.weights`.
            max_norm: of the gradients of all weights of all ranks.
            stay: whether gradients may be kept while others of these parts are there.

        Returns:
            The norm, on all ranks the same bits; it may be NaN or infinite.
        """
        if self._root is not None:
            for name, weight in self._model.named_parameters():
                if weight.grad is not None:
                    self.weights[name].grad = held(weight.grad)
        measured: dict[str, Tensor] = {}
        for weights in parts():
            gradients = self._summed(weights)
            measured |= gradients if stay else {name: get_total_norm([one]) for name, one in gradients.items()}
        norm = self._norm({name: measured[name] for name in self.weights if name in measured})
        for weights in parts():
            clip_grads_with_norm_(list(weights.values()), max_norm, norm)
        return norm.item()

    def _summed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum gradients over the ranks, and return them."""
        gradients: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients[name] = weight.grad
        of_experts = [gradients[name] for name in gradients if name in self._cuts.dealt]
        self._mesh.replicas.all_reduce_sum([gradients[name] for name in gradients if name not in self._cuts.dealt])
        self._mesh.expert_replicas.all_reduce_sum(of_experts)
        if self._cuts.summed:
            self._mesh.tp.all_reduce_sum([gradients[name] for name in sorted(self._cuts.summed) if name in gradients])
        return gradients

    def _norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of all gradients, each counted once; their own norms do as well."""
        if self._mesh.shard.size == self._mesh.tp.size == self._mesh.ep.size == 1:
            return get_total_norm(list(gradients.values()))
        parts: tuple[list[Tensor], ...] = ([], [], [])  # dealt over ep, cut over tp, whole
        for name, gradient in gradients.items():
            parts[0 if name in self._cuts.dealt else 1 if name in self._cuts.cut else 2].append(gradient)
        like = next(iter(gradients.values()))
        nothing = like.new_zeros((), dtype=torch.float64)
        of_dealt, of_cut, of_whole = (
            get_total_norm(part).double().square() if part else nothing.clone() for part in parts
        )
        self._mesh.ep.all_reduce_sum([of_dealt])
        of_cut = of_cut + of_dealt
        self._mesh.tp.all_reduce_sum([of_cut])
        total = of_cut + of_whole
        self._mesh.shard.all_reduce_sum([total])
        return total.sqrt().to(like.dtype)
