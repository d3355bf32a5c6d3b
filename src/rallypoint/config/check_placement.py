"""Contradictions between keys that place roles on processes and devices; see `check.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from rallypoint.config.fields import Problem
from rallypoint.config.recipes import RoleName
from rallypoint.config.sections.places import MeshConfig
from rallypoint.config.shape import ModelShape, misfit_of, read_shape, role_shapes, shape_of
from rallypoint.config.tree import RunConfig
from rallypoint.families import BIASED, FAMILIES, MIXTURES
from rallypoint.transport_kinds import FOLDER, TransportKind

_CUT_OTHERWISE = ("key/value heads", "experts")
_MOST_INLINE = 256
"""Processes that are threads of one; far beyond what is of use."""


def placement_contradictions(config: RunConfig) -> Iterator[Problem]:
    """Yield what stands against the pools, meshes and devices of a config, whatever machine it is on."""
    yield from roles_and_pools(config)
    yield from _shared_models(config)
    yield from _routers(config)
    yield from _cluster(config)


def roles_and_pools(config: RunConfig) -> Iterator[Problem]:
    """Yield that part of it which depends on the sizes of pools and who is on them."""
    yield from _placement(config)
    yield from _mesh(config)
    yield from _server(config)
    yield from _sleep(config)
    yield from _devices(config)


def _placement(config: RunConfig) -> Iterator[Problem]:
    pools = config.cluster.pools
    if not pools:
        yield Problem.of("^cluster.pools is empty; expected at least one pool, such as {main: [1]}")
        return
    whole = True
    num_processes = sum(itertools.chain.from_iterable(pools.values()))
    if config.cluster.runtime == "inline" and num_processes > _MOST_INLINE:
        yield Problem.of(
            f"^cluster.runtime=inline runs all {num_processes} processes of ^cluster.pools in one; expected at most "
            f"{_MOST_INLINE}, or cluster.runtime=ray"
        )
    for name, nodes in pools.items():
        if not nodes or min(nodes) < 1:
            whole = False
            yield Problem.of(
                f"^cluster.pools.{name}={list(nodes)}: expected a process count of at least 1 for each node, such as "
                "[2]"
            )
    for role, placement in config.roles.items():
        key = f"{role}.placement"
        if placement.pool not in pools:
            yield Problem.of(
                f"^{key}.pool={placement.pool!r} is not in ^cluster.pools; expected one of {', '.join(pools)}"
            )
        elif whole and placement.num_ranks is not None and placement.num_ranks > sum(pools[placement.pool]):
            yield Problem.of(
                f"^{key}.num_ranks={placement.num_ranks} is more ranks than pool {placement.pool!r} has bundles "
                f"(^cluster.pools.{placement.pool}={list(pools[placement.pool])} makes {sum(pools[placement.pool])})"
            )
    used = {placement.pool for placement in config.roles.values()}
    for name in pools:
        if name not in used:
            yield Problem.of(
                f"^cluster.pools.{name}={list(pools[name])}: no role is placed on it (they are on "
                f"{', '.join(sorted(used))}); place one with actor.placement.pool={name}, or leave the pool out"
            )


def _mesh(config: RunConfig) -> Iterator[Problem]:
    """Yield meshes that do not have as many cells as the role has ranks."""
    for role, placement in config.roles.items():
        if not config.cluster.pools.get(placement.pool):
            continue
        sizes, ranks = config.mesh(role), config.num_ranks(role)
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        if (product := math.prod(sizes.values())) != ranks:
            name, size = placement.pool, sum(config.cluster.pools[placement.pool])
            larger = f"a pool of as many, such as cluster.pools.{name}=[{product}]"
            if product <= size or placement.num_ranks is not None:
                own = f"{role}.placement.num_ranks={product}"
                larger = own if product <= size else f"{larger} with {own}"
            yield Problem(
                (f"{role}.mesh", f"{role}.placement.num_ranks", "cluster.pools"),
                f"{role}.mesh: {shown} makes {product} ranks, but the role has {ranks} (in pool {name!r}); expected "
                f"sizes whose product divides {ranks}, or {larger}",
            )
        if sizes["dp_shard"] > 1 and config.cluster.runtime == "inline":
            yield Problem.of(
                f"^{role}.mesh.dp_shard={sizes['dp_shard']} needs a process for every rank, and "
                "^cluster.runtime=inline has threads; use cluster.runtime=ray"
            )


def _server(config: RunConfig) -> Iterator[Problem]:
    """Yield what stands against a server over several devices, or ranks that sample together."""
    tp = config.rollout.mesh.tp
    if tp == 1 or "rollout" not in config.roles:
        return
    if config.rollout.engine != "vllm":
        yield from _cut_rollouts(config, tp)
        return
    pool = config.roles["rollout"].pool
    ends = itertools.accumulate(config.cluster.pools.get(pool, ()))  # of nodes, one of them between ranks of a server
    if config.devices_of_rollout == 1 and any(end % tp for end in ends if end < config.num_ranks("rollout")):
        yield Problem.of(
            f"^rollout.mesh.tp={tp} does not divide ^cluster.pools.{pool}={list(config.cluster.pools[pool])}: a vLLM "
            f"server has the devices of {tp} processes of one node; expected a multiple of {tp} on each node, or a "
            f"pool for rollouts alone, each process of which then has {tp} devices"
        )
    if (gpus := config.cluster.num_gpus_per_process) != 1 and config.cluster.device != "cpu":
        yield Problem.of(
            f"^rollout.mesh.tp={tp} with ^cluster.num_gpus_per_process={gpus:g}; expected 1, so that a vLLM server has "
            f"{tp} whole devices"
        )
    # vLLM copies heads of keys and values where there are too few, and cuts each expert.
    shared = {} if (shape := shape_of(config)) is None else shape.shared("tp")
    if misfit := misfit_of(tp, {what: num for what, num in shared.items() if what not in _CUT_OTHERWISE}):
        yield Problem.of(f"^rollout.mesh.tp={misfit}")


def _cut_rollouts(config: RunConfig, tp: int) -> Iterator[Problem]:
    """Yield what stands against ranks that sample together, each from its part of the model."""
    if config.rollout.engine != "native":
        yield Problem.of(
            f"^rollout.mesh.tp={tp}: ^rollout.engine={config.rollout.engine!r} has a whole model in every process; "
            "expected rollout.engine=native or vllm, or rollout.mesh.tp=1"
        )
    shape = shape_of(config)
    if not config.rollout_shares_actor and shape is not None:
        yield from _shared_model("rollout", MeshConfig(tp=tp), shape)
    for name, value in {"exact": config.rollout.exact, "router_replay": config.rollout.router_replay}.items():
        if value:
            yield Problem.of(
                f"^rollout.{name}=true with ^rollout.mesh.tp={tp}: ranks that sample together do not have that; "
                f"expected rollout.{name}=false, or rollout.mesh.tp=1"
            )


def _sleep(config: RunConfig) -> Iterator[Problem]:
    """Yield what there is to say against sleeping between turns."""
    if not config.engine.sleep:
        return
    if config.cluster.device == "cpu":
        yield Problem.of(
            "^engine.sleep=true has nothing to gain with ^cluster.device=cpu, where weights lie in CPU memory "
            "already; leave it at false"
        )
    elif not config.sleeping:
        yield Problem(
            ("engine.sleep", "cluster.pools"),
            "engine.sleep=true has nothing to gain: every role has a pool of its own; leave it at false",
        )


def _shared_models(config: RunConfig) -> Iterator[Problem]:
    """Yield numbers of ranks that cannot share a model; nothing while its sizes are not known, as on the hub."""
    for role in config.roles:
        own = config.critic.path if role == "critic" else None  # the plan takes it to be of the actor's shape
        for shape in role_shapes(config, role) if own is None else (read_shape(own),):
            if shape is not None and role != "rollout":
                yield from _shared_model(role, config.mesh_of(role), shape)
    shape = shape_of(config)
    if shape is not None and config.rollout.exact:
        for why in filter(None, (mixer.inexact for mixer in shape.mixers)):
            text = f"rollout.exact=true: models of type {shape.model_type!r} have {why}; leave it at false"
            yield Problem(("rollout.exact",), text)


def _shared_model(role: RoleName, mesh: MeshConfig, shape: ModelShape) -> Iterator[Problem]:
    if mesh.tp > 1 and shape.model_type not in FAMILIES:
        yield Problem.of(
            f"^{role}.mesh.tp={mesh.tp}: models of type {shape.model_type!r} cannot be shared by tensor parallelism; "
            f"those of type {', '.join(FAMILIES)} can"
        )
    elif mesh.ep > 1 and shape.model_type not in MIXTURES:
        yield Problem.of(
            f"^{role}.mesh.ep={mesh.ep}: models of type {shape.model_type!r} have no experts to deal over ranks; those "
            f"of type {', '.join(MIXTURES)} have. Use {role}.mesh.dp_shard or {role}.mesh.tp"
        )
    elif misfit := misfit_of(mesh.tp, shape.shared("tp")):
        yield Problem.of(f"^{role}.mesh.tp={misfit}")
    elif misfit := misfit_of(mesh.ep, shape.shared("ep", mesh.tp)):
        yield Problem((f"{role}.mesh.ep", f"{role}.mesh.tp"), f"{role}.mesh.ep={misfit}")
    elif misfit := misfit_of(mesh.sp, shape.shared("sp", mesh.tp)):
        other = f", or {role}.mesh.cp, which may be any number" if not shape.shared("cp", mesh.tp) else ""
        yield Problem((f"{role}.mesh.sp", f"{role}.mesh.tp"), f"{role}.mesh.sp={misfit}{other}")
    elif misfit := misfit_of(mesh.cp * mesh.sp, shape.shared("cp", mesh.tp)):
        axes = [axis for axis, size in (("cp", mesh.cp), ("sp", mesh.sp)) if size > 1]
        names = tuple(f"{role}.mesh.{axis}" for axis in (*axes, "tp"))
        yield Problem(names, f"{role}.mesh.{' x '.join(axes)}={misfit}")


def _routers(config: RunConfig) -> Iterator[Problem]:
    """Yield what is asked of routers that the model does not have, or that a sampler does not say."""
    engine, shape = config.rollout.engine, shape_of(config)
    replays = config.rollout.router_replay and "rollout" in config.roles
    if replays and engine == "hf":
        yield Problem.of(
            f"^rollout.router_replay=true: ^rollout.engine={engine!r} does not say which experts it chose; expected "
            "rollout.engine=native or vllm, or rollout.router_replay=false"
        )
    if replays and engine == "vllm" and config.rollout.max_staleness:
        yield Problem.of(
            "^rollout.router_replay=true with ^rollout.max_staleness: where weights come in the middle of a response, "
            "^rollout.engine='vllm' says the experts of the newest for all tokens; expected rollout.engine=native"
        )
    replay, coef, rate = "rollout.router_replay", "actor.router_aux_loss_coef", "actor.router_bias_update_rate"
    asked = {replay: replays, coef: config.actor.router_aux_loss_coef, rate: config.actor.router_bias_update_rate}
    for name, value in asked.items():
        if value and shape is not None and shape.model_type not in MIXTURES:
            yield Problem.of(
                f"^{name}={str(value).lower()}: models of type {shape.model_type!r} have no experts that are known; "
                f"those of type {', '.join(MIXTURES)} have. Leave it out"
            )
        elif value and name == rate and shape is not None and shape.model_type not in BIASED:
            yield Problem.of(
                f"^{name}={value}: routers of models of type {shape.model_type!r} have no bias; those of type "
                f"{', '.join(BIASED)} have. Leave it out; {coef} balances the experts of any mixture"
            )
    if asked[rate] and config.model.lora is not None:
        yield Problem.of(
            f"^{rate}={asked[rate]} contradicts ^model.lora, with which routers stay as they are; leave one of them out"
        )


def _cluster(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.address is not None and cluster.runtime == "inline":
        yield Problem.of(
            f"^cluster.address={cluster.address!r} contradicts ^cluster.runtime=inline, which runs everything in this "
            "process; leave one of them out"
        )
    if cluster.address is not None and not _is_address(cluster.address) and cluster.address != "auto":
        yield Problem.of(
            f"^cluster.address={cluster.address!r}: expected auto, or the host:port of a running cluster's head, such "
            "as 10.0.0.1:6379"
        )
    if cluster.rendezvous == "ray" and cluster.runtime == "inline":
        yield Problem.of(
            "^cluster.rendezvous=ray contradicts ^cluster.runtime=inline, which has no Ray; leave it at auto"
        )
    kind = cluster.rendezvous
    if kind not in ("auto", "ray", "tcp") and not kind.startswith(("http://", "https://")):
        yield Problem.of(
            f"^cluster.rendezvous={kind!r}: expected auto, ray, tcp, or the URL of an etcd server, such as "
            "http://10.0.0.1:2379"
        )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in text and port.isdigit() and 0 < int(port) < 65536


def _devices(config: RunConfig) -> Iterator[Problem]:
    """Yield what stands against the device that was chosen."""
    cluster = config.cluster
    gpus = cluster.num_gpus_per_process
    if gpus > 1 and gpus % 1:
        yield Problem.of(
            f"^cluster.num_gpus_per_process={gpus:g}: expected a whole number, or a fraction below 1 to share a GPU"
        )
    if config.engine.activations == "offload" and cluster.device == "cpu":
        yield Problem.of(
            "^engine.activations='offload' has nothing to gain with ^cluster.device=cpu, where activations lie in CPU "
            "memory already; expected checkpoint or keep"
        )
    offload = config.engine.offload
    if offload != "nothing" and cluster.device == "cpu":
        yield Problem.of(
            f"^engine.offload={offload!r} has nothing to gain with ^cluster.device=cpu, where the optimizer's state "
            "lies in CPU memory already; expected nothing"
        )
    for role in config.learners:
        if offload == "optimizer_and_gradients" and (num := config.mesh(role)["dp_shard"]) > 1:
            yield Problem.of(
                f"^engine.offload={offload!r} with ^{role}.mesh.dp_shard={num}: gradients of a rank's part of the "
                f"model stay on its device; expected optimizer, or {role}.mesh.dp_shard=1"
            )
    if ":" in cluster.device:
        yield Problem.of(
            f"^cluster.device={cluster.device!r}: expected the kind alone, such as {cluster.device.split(':')[0]}; "
            "which one a process takes is decided by its place (CUDA_VISIBLE_DEVICES hides some)"
        )
    if cluster.device == "cuda":
        yield from _inline_processes(config)
        yield from _shared_by_ranks(config)


def _inline_processes(config: RunConfig) -> Iterator[Problem]:
    num_processes = sum(map(sum, config.cluster.pools.values()))
    if config.cluster.runtime == "inline" and num_processes > 1:
        yield Problem.of(
            f"^cluster.runtime=inline with ^cluster.device=cuda: the {num_processes} processes of ^cluster.pools would "
            "be threads on one GPU, where NCCL refuses several ranks; use cluster.runtime=ray, or one process"
        )


def _shared_by_ranks(config: RunConfig) -> Iterator[Problem]:
    """Yield roles of which several ranks would be on one GPU: NCCL refuses that."""
    gpus = config.cluster.num_gpus_per_process
    if config.cluster.runtime == "inline" or gpus > 0.5:  # more than half of one is had by one process
        return
    for role, placement in config.roles.items():
        per_node = config.cluster.pools.get(placement.pool, ())
        if role != "rollout" and config.num_ranks(role) > 1 and max(per_node, default=0) > 1:
            yield Problem(
                ("cluster.num_gpus_per_process", f"{role}.placement.pool"),
                f"cluster.num_gpus_per_process={gpus:g} puts several of the {config.num_ranks(role)} ranks of {role} "
                "on one GPU, which NCCL refuses; expected 1, or one process that has the GPU for itself "
                f"(cluster.pools.{placement.pool}=[1])",
            )
            return


def way_of_weights(config: RunConfig, kind: TransportKind) -> Iterator[Problem]:
    """Yield why published weights cannot take the way that was named."""
    way = kind.name
    placements = (config.actor.placement, config.rollout.placement)
    pools = {placement.pool: config.cluster.pools.get(placement.pool, ()) for placement in placements}
    if config.actor.placement.pool in config.cluster.pools and config.rollout_shares_actor:
        yield Problem(
            ("rollout.weights", "rollout.placement.pool", "actor.placement.pool"),
            f"rollout.weights={way!r} has no effect: rollouts are sampled from the actor's own weights, on the same "
            "pool; leave it at auto",
        )
    elif kind != FOLDER and config.rollout.mesh.tp > 1 and config.rollout.engine == "native":
        yield Problem.of(
            f"^rollout.weights={way!r} carries whole weights, and ^rollout.mesh.tp={config.rollout.mesh.tp} leaves "
            "each rank a part of them; expected auto or folder"
        )
    elif kind.of_devices and config.cluster.device == "cpu":
        yield Problem.of(
            f"^rollout.weights={way!r} shares the memory of accelerators, and ^cluster.device=cpu has none; expected "
            "auto or memory"
        )
    elif kind.within_node and any(len(nodes) > 1 for nodes in pools.values()):
        name = next(name for name, nodes in pools.items() if len(nodes) > 1)
        yield Problem.of(
            f"^rollout.weights={way!r} leads from process to process of one node, but "
            f"^cluster.pools.{name}={list(pools[name])} has {len(pools[name])}; expected auto, broadcast or folder"
        )
