"""The device mesh of a role: which ranks hold which part of its model, and the groups in which they communicate.

    dp_replicate    copies of the model, different rows
    dp_shard        one copy cut over the ranks (FSDP2), different rows
    ep              the experts dealt over the ranks, copies of all else, different rows
    cp              same weights, same rows, different tokens; keys and values travel
    sp              same weights, same rows, different tokens; heads travel (Ulysses)
    tp              one copy cut over the ranks (Megatron), same rows, same tokens

Ranks are numbered with the last axis fastest, so that tp peers are neighbours.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rallypoint.cluster.mesh import Mesh
from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.parallel.collective import Collective, Grouped, connect
from rallypoint.parallel.process_group import Device

AXES = ("dp_replicate", "dp_shard", "ep", "cp", "sp", "tp")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeviceMesh:
    """One rank's view of the mesh: its place on every axis, and its peers along it."""

    sizes: Mapping[str, int]
    """Axis -> size; all axes."""
    coordinates: Mapping[str, int]
    """Axis -> this rank's place on it."""
    everyone: Collective
    """All ranks of the role."""
    replicas: Collective
    """Ranks with the same part of the weights, along dp_replicate, ep, cp and sp. Gradients are summed over them."""
    expert_replicas: Collective
    """Ranks with the same experts, along dp_replicate, cp and sp."""
    passes: Collective
    """Ranks that make their passes together, along dp_shard and ep."""
    shard: Collective
    """Along dp_shard."""
    ep: Collective
    """Along ep."""
    tokens: Collective
    """Ranks that share the tokens of the same rows, along cp and sp."""
    cp: Collective
    """Along cp."""
    sp: Collective
    """Along sp."""
    tp: Collective
    """Along tp."""

    @property
    def rank(self) -> int:
        """Number of this rank among all ranks of the role, from 0."""
        return self.everyone.rank

    def abandon(self) -> None:
        """Leave all groups in the middle of an operation: ranks that wait for this one fail at once."""
        met = (getattr(self, field.name) for field in dataclasses.fields(self))
        for group in dict.fromkeys(one.group for one in met if isinstance(one, Grouped)):
            group.abandon()

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Leave all groups if the block raises, so that others do not wait for this rank."""
        with contextlib.ExitStack() as unless_all_goes_well:
            unless_all_goes_well.callback(self.abandon)
            yield
            unless_all_goes_well.pop_all()

    @classmethod
    def solo(cls) -> DeviceMesh:
        """Return the mesh of a single rank."""
        one = Collective()
        return cls(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 0), *[one] * 10)

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous | None,
        name: str,
        rank: int,
        sizes: Mapping[str, int],
        *,
        timeout_s: float = 600.0,
        device: Device = "cpu",
        generation: int | None = None,
    ) -> DeviceMesh:
        """Meet the other ranks, along every axis that has more than one.

        Args:
            rendezvous: where ranks meet; may be None for a single rank.
            name: the role's.
            rank: this rank, from 0.
            sizes: axis -> size; an axis that is not named has one rank.
            timeout_s: how long to wait for the others, and later for each operation.
            device: where tensors will be.
            generation: see `Rendezvous.join`.

        Raises what `meet` raises, and:

        Raises:
            ValueError: there is no such axis.
        """
        if unknown := sizes.keys() - set(AXES):
            raise ValueError(f"{name}: a mesh has the axes {', '.join(AXES)}, not {', '.join(sorted(unknown))}")
        grid = Mesh({axis: sizes.get(axis, 1) for axis in AXES})
        if grid.size == 1:
            return cls.solo()
        assert rendezvous is not None, "several ranks need a place to meet"
        met: dict[tuple[int, ...], Collective] = {}

        def group(*along: str) -> Collective:
            ranks = tuple(peers(grid, rank, along))
            if ranks not in met:
                meeting = f"{name}/{'-'.join(along)}/{ranks[0]}"
                met[ranks] = connect(
                    rendezvous,
                    meeting,
                    ranks.index(rank),
                    len(ranks),
                    timeout_s=timeout_s,
                    device=device,
                    generation=generation,
                )
            return met[ranks]

        # One order of meetings for all ranks; a group that another axis has met already is met once.
        tokens, passes = ("cp", "sp"), ("dp_shard", "ep")
        copies, of_experts = ("dp_replicate", "ep", *tokens), ("dp_replicate", *tokens)
        along = (AXES, copies, of_experts, passes, ("dp_shard",), ("ep",), tokens, ("cp",), ("sp",), ("tp",))
        return cls(dict(grid.axes), grid.coordinates(rank), *[group(*axes) for axes in along])


def peers(grid: Mesh, rank: int, along: Sequence[str]) -> list[int]:
    """Return the ranks whose coordinates differ from this rank's only on these axes, itself among them.

    >>> grid = Mesh({"dp_shard": 2, "tp": 2})
    >>> peers(grid, 1, ["tp"]), peers(grid, 1, ["dp_shard"]), peers(grid, 1, ["dp_shard", "tp"])
    ([0, 1], [1, 3], [0, 1, 2, 3])
    """
    fixed = {axis: at for axis, at in grid.coordinates(rank).items() if axis not in along}
    return [other for other in range(grid.size) if fixed.items() <= grid.coordinates(other).items()]
