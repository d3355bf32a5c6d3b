"""Contradictions between keys: each is one function that yields problems, with the keys it looked at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from rallypoint.config.check_devices import device_contradictions
from rallypoint.config.check_sampling import sampling_contradictions
from rallypoint.config.check_vllm import vllm_contradictions
from rallypoint.config.fields import shown, values_of
from rallypoint.config.mesh_fit import misfit_of
from rallypoint.config.problem import Problem
from rallypoint.config.recipes import RECIPES
from rallypoint.config.sections import LoRAConfig
from rallypoint.config.shape import read_shape, shape_of
from rallypoint.config.source import COMMAND_LINE
from rallypoint.config.tree import RunConfig, unread_sections, why_unread
from rallypoint.families import FAMILIES

_MOST_INLINE = 256
"""Processes that are threads of one; far beyond what is of use."""


def contradictions(config: RunConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Yield everything in which single right keys do not fit together."""
    yield from _either_or(config)
    yield from _reward(config)
    for check in RECIPES[config.recipe].checks:
        yield from check(config)
    yield from _batch(config)
    if "rollout" in config.roles:
        yield from sampling_contradictions(config)
        yield from vllm_contradictions(config)
    yield from _created_model(config)
    yield from _lora(config)
    yield from _placement(config)
    yield from _mesh(config)
    yield from _sleep(config)
    yield from _shared_models(config)
    yield from _cluster(config)
    yield from device_contradictions(config)
    yield from _without_effect(config, origins)


def _without_effect(config: RunConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Yield keys that were set by hand, for this run, and that nothing reads; in a file they may wait for their day."""
    unread, values = unread_sections(config), dict(values_of(config))
    for name, origin in origins.items():
        setting = why_unread(unread, name)
        if origin == COMMAND_LINE and setting is not None and name in values:
            yield Problem(
                (name, setting.split("=")[0]),
                f"{name}={shown(values[name])} has no effect: with {setting} nothing reads it",
            )


def _either_or(config: RunConfig) -> Iterator[Problem]:
    model, data = config.model, config.data
    if model.path is None and model.create is None:
        yield Problem(
            ("model.path", "model.create"),
            "model.path: required, but not set; expected the Hugging Face folder of a causal language model, "
            "or model.create={} for a small new one",
            is_missing=True,
        )
    if model.path is not None and model.create is not None:
        yield Problem(
            ("model.path", "model.create"),
            f"model.path={model.path!r} contradicts model.create, which makes a new model: add model.create=null",
        )
    if not data.train and data.generate is None:
        yield Problem(
            ("data.train", "data.generate"),
            "data.train: required, but not set; expected .parquet or .jsonl files, or data.generate={} for digit tasks",
            is_missing=True,
        )
    if data.train and data.generate is not None:
        yield Problem(
            ("data.train", "data.generate"),
            f"data.train={data.train[0]!r} contradicts data.generate, which makes a new data set: "
            "add data.generate=null",
        )
    if data.validation and data.generate is not None and not data.train:
        yield Problem(
            ("data.validation", "data.generate"),
            f"data.validation={data.validation[0]!r} contradicts data.generate, which makes validation prompts too: "
            "add data.generate=null",
        )


def _reward(config: RunConfig) -> Iterator[Problem]:
    if "rollout" not in config.roles:
        return
    if config.reward.function is None and config.reward.path is None:
        yield Problem(
            ("reward.function", "reward.path"),
            "reward.function: required, but not set; expected `file.py:compute_score`, or reward.path=FOLDER for a "
            "reward model",
            is_missing=True,
        )
    if config.reward.function == "digits" and config.data.generate is None:
        yield Problem(
            ("reward.function", "data.generate"),
            "reward.function='digits' scores the digit tasks of data.generate, which is off; expected file.py:function",
        )


def _batch(config: RunConfig) -> Iterator[Problem]:
    rows = config.num_rows
    for role, learner in config.learners.items():
        if (num_mini_batches := learner.num_mini_batches) > rows:
            yield Problem(
                (f"{role}.num_mini_batches", "rollout.num_prompts", "rollout.group_size"),
                f"{role}.num_mini_batches={num_mini_batches} is more than the {rows} rows of a step "
                f"(rollout.num_prompts={config.rollout.num_prompts} x rollout.group_size={config.rollout.group_size})",
            )
    cap = config.engine.max_tokens_per_micro_batch
    if cap < config.max_row_tokens:
        yield Problem(
            ("engine.max_tokens_per_micro_batch", "data.max_prompt_tokens", "rollout.max_response_tokens"),
            f"engine.max_tokens_per_micro_batch={cap} is less than one row can have: expected at least "
            f"{config.max_row_tokens} (data.max_prompt_tokens={config.data.max_prompt_tokens} + "
            f"rollout.max_response_tokens={config.rollout.max_response_tokens})",
        )


def _created_model(config: RunConfig) -> Iterator[Problem]:
    made = config.model.create
    if made is None:
        return
    if made.hidden_size % 2:
        yield Problem(
            ("model.create.hidden_size",),
            f"model.create.hidden_size={made.hidden_size} is odd, and heads of an even width must fill it; "
            f"expected {made.hidden_size - 1} or {made.hidden_size + 1}",
        )
    elif made.hidden_size % made.num_heads or (made.hidden_size // made.num_heads) % 2:
        fits = [n for n in range(1, 65) if made.hidden_size % n == 0 and (made.hidden_size // n) % 2 == 0]
        yield Problem(
            ("model.create.num_heads", "model.create.hidden_size"),
            f"model.create.num_heads={made.num_heads} does not divide model.create.hidden_size={made.hidden_size} "
            f"into heads of an even width; expected one of {', '.join(map(str, fits))}",
        )
    if made.num_heads % made.num_key_value_heads:
        fits = [n for n in range(1, made.num_heads + 1) if made.num_heads % n == 0]
        yield Problem(
            ("model.create.num_key_value_heads", "model.create.num_heads"),
            f"model.create.num_key_value_heads={made.num_key_value_heads} does not divide model.create.num_heads="
            f"{made.num_heads}; expected one of {', '.join(map(str, fits))}",
        )


def _lora(config: RunConfig) -> Iterator[Problem]:
    lora = config.model.lora
    if lora is None:
        return
    if not lora.target_modules:
        yield Problem(
            ("model.lora.target_modules",),
            "model.lora.target_modules is empty, so nothing would be trained; expected all-linear, or names such as "
            "[q_proj, v_proj]",
        )
    if lora.path is None:
        return
    for name, info in LoRAConfig.model_fields.items():
        value = getattr(lora, name)
        if name != "path" and value != info.default:
            yield Problem(
                (f"model.lora.{name}", "model.lora.path"),
                f"model.lora.{name}={shown(value)} contradicts model.lora.path={lora.path!r}, where "
                "adapter_config.json says it already; leave one of them out",
            )


def _placement(config: RunConfig) -> Iterator[Problem]:
    pools = config.cluster.pools
    if not pools:
        yield Problem(("cluster.pools",), "cluster.pools is empty; expected at least one pool, such as {main: [1]}")
        return
    whole = True
    num_processes = sum(itertools.chain.from_iterable(pools.values()))
    if config.cluster.runtime == "inline" and num_processes > _MOST_INLINE:
        yield Problem(
            ("cluster.pools", "cluster.runtime"),
            f"cluster.runtime=inline runs all {num_processes} processes of cluster.pools in one; expected at most "
            f"{_MOST_INLINE}, or cluster.runtime=ray",
        )
    for name, nodes in pools.items():
        if not nodes or min(nodes) < 1:
            whole = False
            yield Problem(
                (f"cluster.pools.{name}",),
                f"cluster.pools.{name}={list(nodes)}: expected a process count of at least 1 for each node, "
                "such as [2]",
            )
    for role, placement in config.roles.items():
        key = f"{role}.placement"
        if placement.pool not in pools:
            yield Problem(
                (f"{key}.pool", "cluster.pools"),
                f"{key}.pool={placement.pool!r} is not in cluster.pools; expected one of {', '.join(pools)}",
            )
        elif whole and placement.num_ranks is not None and placement.num_ranks > sum(pools[placement.pool]):
            yield Problem(
                (f"{key}.num_ranks", "cluster.pools"),
                f"{key}.num_ranks={placement.num_ranks} is more ranks than pool {placement.pool!r} has bundles "
                f"(cluster.pools.{placement.pool}={list(pools[placement.pool])} makes {sum(pools[placement.pool])})",
            )
    used = {placement.pool for placement in config.roles.values()}
    for name in pools:
        if name not in used:
            yield Problem(
                (f"cluster.pools.{name}",),
                f"cluster.pools.{name}={list(pools[name])}: no role is placed on it (they are on "
                f"{', '.join(sorted(used))}); place one with actor.placement.pool={name}, or leave the pool out",
            )


def _mesh(config: RunConfig) -> Iterator[Problem]:
    """Yield meshes that do not have as many cells as the role has ranks."""
    for role, placement in config.roles.items():
        if role == "rollout" or not config.cluster.pools.get(placement.pool):
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
            yield Problem(
                (f"{role}.mesh.dp_shard", "cluster.runtime"),
                f"{role}.mesh.dp_shard={sizes['dp_shard']} needs a process for every rank, and cluster.runtime=inline "
                "has threads; use cluster.runtime=ray",
            )


def _sleep(config: RunConfig) -> Iterator[Problem]:
    """Yield what there is to say against sleeping between turns."""
    if not config.engine.sleep:
        return
    if config.cluster.device == "cpu":
        yield Problem(
            ("engine.sleep", "cluster.device"),
            "engine.sleep=true has nothing to gain with cluster.device=cpu, where weights lie in CPU memory already; "
            "leave it at false",
        )
    elif not config.sleeping:
        yield Problem(
            ("engine.sleep", "cluster.pools"),
            "engine.sleep=true has nothing to gain: every role has a pool of its own; leave it at false",
        )
    for role in sorted(config.sleeping):
        if (num_shards := config.mesh(role)["dp_shard"]) > 1:
            yield Problem(
                (f"{role}.mesh.dp_shard", "engine.sleep"),
                f"{role}.mesh.dp_shard={num_shards} cannot be combined with engine.sleep=true yet, but leaves each "
                "rank a part of the weights already; leave one of them out",
            )


def _shared_models(config: RunConfig) -> Iterator[Problem]:
    """Yield numbers of ranks that cannot share a model; nothing while its sizes are not known, as on the hub."""
    for role, mesh in (
        ("actor", config.actor.mesh),
        ("critic", config.critic.mesh),
        ("reference", config.reference.mesh),
        ("reward", config.reward.mesh),
    ):
        tp, own_path = mesh.tp, config.own_models.get(role)
        shape = shape_of(config) if own_path is None else read_shape(Path(own_path).expanduser())
        if shape is None or role not in config.roles:
            continue
        if tp > 1 and shape.model_type not in FAMILIES:
            yield Problem(
                (f"{role}.mesh.tp",),
                f"{role}.mesh.tp={tp}: models of type {shape.model_type!r} cannot be shared by tensor parallelism; "
                f"those of type {', '.join(FAMILIES)} can",
            )
        elif misfit := misfit_of(tp, shape.shared_by_tensor_parallel_ranks):
            yield Problem((f"{role}.mesh.tp",), f"{role}.mesh.tp={misfit}")
        elif misfit := misfit_of(mesh.sp, {"attention heads of a tp rank": shape.num_heads // tp}):
            yield Problem((f"{role}.mesh.sp", f"{role}.mesh.tp"), f"{role}.mesh.sp={misfit}")


def _cluster(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.address is not None and cluster.runtime == "inline":
        yield Problem(
            ("cluster.address", "cluster.runtime"),
            f"cluster.address={cluster.address!r} contradicts cluster.runtime=inline, which runs everything in this "
            "process; leave one of them out",
        )
    if cluster.address is not None and not _is_address(cluster.address) and cluster.address != "auto":
        yield Problem(
            ("cluster.address",),
            f"cluster.address={cluster.address!r}: expected auto, or the host:port of a running cluster's head, such "
            "as 10.0.0.1:6379",
        )
    if cluster.rendezvous == "ray" and cluster.runtime == "inline":
        yield Problem(
            ("cluster.rendezvous", "cluster.runtime"),
            "cluster.rendezvous=ray contradicts cluster.runtime=inline, which has no Ray; leave it at auto",
        )
    kind = cluster.rendezvous
    if kind not in ("auto", "ray", "tcp") and not kind.startswith(("http://", "https://")):
        yield Problem(
            ("cluster.rendezvous",),
            f"cluster.rendezvous={kind!r}: expected auto, ray, tcp, or the URL of an etcd server, such as "
            "http://10.0.0.1:2379",
        )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in text and port.isdigit() and 0 < int(port) < 65536
