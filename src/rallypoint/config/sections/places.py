"""Where roles run, and how the ranks of one divide its model and its rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Strict

from rallypoint.config.fields import Section, key

ProcessesPerNode = Annotated[tuple[int, ...], Strict(False)]


class PlacementConfig(Section):
    """Where a role runs."""

    pool: str = key("main", help="Name of the pool in cluster.pools; roles on one pool share its processes.")
    num_ranks: int | None = key(
        None, at_least=1, help="How many of the pool's processes the role uses; null uses all of them."
    )


class MeshConfig(Section):
    """How the ranks of a role divide its model and its rows; ranks that these leave hold copies (dp_replicate)."""

    dp_shard: int = key(
        1,
        at_least=1,
        automatic=True,
        help="Ranks that share one copy (FSDP2), each with its own rows; null: 1 if a device has room for that.",
    )
    ep: int = key(1, at_least=1, help="Ranks that share the experts of a mixture, each with rows of its own.")
    cp: int = key(
        1,
        at_least=1,
        hidden=True,
        help="Ranks that share the tokens of the same rows, more than heads if need be: keys and values travel.",
    )
    sp: int = key(1, at_least=1, help="Ranks that share the tokens of the same rows (Ulysses).")
    tp: int = key(1, at_least=1, help="Ranks that share the matrices, for the same tokens (Megatron).")


class RolloutMeshConfig(Section):
    """How ranks that sample together divide the model, or the devices of a server."""

    tp: int = key(1, at_least=1, automatic=True, hidden=True, help="Ranks that sample together, or a server's devices.")


class ClusterConfig(Section):
    """Processes and devices."""

    runtime: Literal["ray", "inline"] = key("ray", help="Worker processes on Ray, or all in this process.")
    address: str | None = key(
        None, help="Running Ray cluster to join: auto, or the head's host:port; null starts one on this machine."
    )
    pools: dict[str, ProcessesPerNode] = key(
        {"main": (1,)},
        automatic=True,
        help="Pool name to processes per node, such as {main: [4, 4]}; null: for all cores or devices here.",
    )
    num_cpus_per_process: int = key(
        1,
        at_least=1,
        at_most=1024,
        unit="cores",
        automatic=True,
        help="Cores (and torch threads) each; null: 1, or with pools=null what the processes leave over.",
    )
    num_gpus_per_process: float = key(
        1.0, above=0, at_most=16, unit="GPUs", help="Where device is not cpu; may be a fraction."
    )
    memory_gib_per_process: float | None = key(
        None, above=0, unit="GiB", help="Memory to reserve for each; null reserves none."
    )
    labels: dict[str, str] = key({}, help='Only nodes with these labels, such as {"ray.io/accelerator-type": H100}.')
    device: str = key(
        "cpu", help="What processes compute on, in torch's word: cpu, or an accelerator such as cuda or xpu."
    )
    rendezvous: str = key(
        "auto",
        help="Where ranks meet: ray (a Ray actor), tcp (a store of the driver), an etcd server's URL; auto: what fits.",
    )
    placement_timeout_s: float = key(300.0, above=0, unit="s", help="How long to wait for a place on the cluster.")
    call_timeout_s: float = key(1800.0, above=0, unit="s", help="How long a call may make no progress.")
    heartbeat_timeout_s: float = key(
        60.0, at_least=5, unit="s", help="How long a process may give no sign of life during a call."
    )
    object_store_gib: float = key(
        0.5,
        at_least=0.1,
        at_most=1024,
        unit="GiB",
        automatic=True,
        help="Shared memory for data between processes; null: what a step needs, 0.5 at least.",
    )
