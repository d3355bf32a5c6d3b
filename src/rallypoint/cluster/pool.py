"""Devices that roles are placed on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ResourcePool:
    """A number of processes on each of some nodes, and what each process takes.

    >>> ResourcePool("main", (4, 2)).num_processes
    6
    """

    name: str
    processes_per_node: tuple[int, ...]
    num_cpus: int = 1
    """Cores of each process."""
    device: str = "cpu"
    """With "cuda" each process takes one GPU as well."""

    @property
    def num_processes(self) -> int:
        """Processes on all nodes together; one process is one bundle."""
        return sum(self.processes_per_node)

    @property
    def bundle(self) -> dict[str, float]:
        """What one process takes, in Ray's words."""
        return {"CPU": self.num_cpus} | ({"GPU": 1.0} if self.device == "cuda" else {})
