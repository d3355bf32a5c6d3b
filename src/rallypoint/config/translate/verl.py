"""Configs of verl: what follows from several of its keys together, and which of its sections mean something else."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from annotated_types import Le

from rallypoint.config.fields import named_sections, nested
from rallypoint.config.other_projects import other_projects
from rallypoint.config.translate.corrections import set_verl_corrections
from rallypoint.config.translate.reading import read_keys, with_referred
from rallypoint.config.translate.table import (
    Ends,
    Translation,
    by_table,
    count_of,
    name_doubtful,
    set_trackers,
    set_warmup,
    take_unresolved,
    with_usual,
)
from rallypoint.config.tree import RunConfig
from rallypoint.errors import ConfigError

_PROGRAM = re.compile(r"(verl|recipe)\.[\w.]*(main_\w+|sft_trainer\w*)")
_SAME_PROGRAMS = ("main_ppo", "main_dapo")
"""Those that compute what the keys say, and nothing else."""
_SAMPLERS_AHEAD = ("fully_async", "one_step_off")
_CUTS_OF_ROWS = ("ulysses_sequence_parallel_size", "megatron.context_parallel_size")
_ACTOR = "actor_rollout_ref.actor"
_MOST_BATCHES, _NEVER = 1000, 10**6
_SCORES = ("reward", "score", "seq_reward", "seq_final_reward")
"""Its names of what a group is filtered by that are the score."""
_DEVICES = ("cuda", "cpu", "xpu")
"""Its devices that torch knows by itself."""


def from_verl(text: str) -> Translation:
    """Translate a command line of verl's, or a script or a YAML file by its name.

    >>> found = from_verl("algorithm.adv_estimator=grpo data.train_batch_size=64 actor_rollout_ref.actor.optim.lr=1e-5")
    >>> [found.keys[name] for name in ("recipe", "rollout.num_prompts", "rollout.group_size", "kl")]
    ['grpo', 64, 1, None]
    >>> "actor_rollout_ref.rollout.n=1" in found.usual
    True

    Raises:
        ConfigError: it cannot be read, or does not say which algorithm it is.
    """
    verl = other_projects().verl
    given, script = read_keys(text)
    found = Translation(num_given=len(given))
    theirs = take_unresolved(with_referred(given, verl.defaults, os.environ), found)
    if (files := theirs.pop("defaults", None)) is not None:
        found.differs[f"defaults={files}"] = (
            "files that it names are not read; what stands only there is verl's default here"
        )
    _name_programs(script.words, found)
    is_tuning = _is_sft(script.words, given)
    theirs = with_usual(theirs, verl.defaults_sft if is_tuning else verl.defaults, given, found)
    ends = Ends(theirs)
    if is_tuning:
        found.keys["recipe"] = "sft"
    else:
        _set_algorithm(ends, found)
    if found.keys["recipe"] == "ppo":
        theirs = with_usual(theirs, verl.defaults_critic, given, found)
    if count_of(ends.peek("model.lora_rank")):
        theirs = with_usual(theirs, verl.defaults_lora, given, found)
    if ends.get("trainer.total_training_steps") is None:
        theirs = with_usual(theirs, verl.defaults_sft_length if is_tuning else verl.defaults_length, given, found)
    ends = Ends(theirs, ends.taken)
    if is_tuning:
        _set_sft(ends, found)
    else:
        _set_clip(ends, found)
        _set_kl(ends, found)
        _set_filter(ends, found)
        set_verl_corrections(ends, found)
        _set_batch(ends, found)
    _set_length(ends, found)
    _set_frame(ends, found)
    if not any("megatron" in one for one in (*script.words, *theirs)):
        _set_shards(ends, found)
    _set_validation(ends, found)
    name_doubtful(script, found)
    ambiguous = {"reward": verl.reward_words, "reward_model": verl.reward_words}
    ambiguous |= {name: frozenset({name}) for name in verl.ambiguous}
    return by_table({key: value for key, value in theirs.items() if key not in ends.taken}, found, ambiguous)


def _is_sft(words: Sequence[str], given: Iterable[str]) -> bool:
    """Whether a command, or the keys of a file, are of its supervised fine-tuning, whose keys have no roles.

    >>> _is_sft(["-m", "verl.trainer.fsdp_sft_trainer"], []), _is_sft([], ["data.max_length", "optim.lr"])
    (True, True)
    >>> _is_sft(["-m", "verl.trainer.main_ppo"], ["algorithm.adv_estimator", "data.max_length"])
    False
    """
    if any("sft_trainer" in word for word in words):
        return True
    sections = {key.partition(".")[0] for key in given}
    return sections.isdisjoint({"algorithm", "actor_rollout_ref", "critic"}) and {"data", "optim"} <= sections


def _set_sft(ends: Ends, found: Translation) -> None:
    """Set what the table of names cannot say."""
    verl = other_projects().verl
    if (path := ends.get("model.path", ends.get("model.partial_pretrain"))) is not None:
        found.keys["model.path"] = path
    found.keys["data.num_examples"] = ends.get("data.train_batch_size")
    for theirs, ours in verl.sft_columns.items():
        if (name := ends.get(f"data.{theirs}")) not in (None, ours):
            found.keys[f"data.columns.{ours}"] = name
    cut = ends.get("data.truncation", "error")
    if cut in verl.sft_on_too_long:
        found.keys["data.on_too_long"] = verl.sft_on_too_long[cut]
    else:
        found.open[f"data.truncation={cut}"] = "rows can be cut at their end: data.on_too_long=truncate"
    tokens, parts = ends.get("data.max_token_len_per_gpu"), ends.peek("engine.ulysses_sequence_parallel_size", 1)
    if isinstance(tokens, int) and isinstance(parts, int):  # of the part of each row that a GPU has
        found.keys["engine.max_tokens_per_micro_batch"] = tokens * parts
    if (when := ends.peek("trainer.test_freq")) is not None and not isinstance(when, int):
        ends.get("trainer.test_freq")
        found.open[f"trainer.test_freq={when}"] = "validation.every_steps is a number of steps"
    for name, why in verl.sft_unneeded.items():
        if ends.has(f"data.{name}"):
            found.open[f"data.{name}={ends.get(f'data.{name}')}"] = why


def _name_programs(words: Sequence[str], found: Translation) -> None:
    programs = [word for word in words if _PROGRAM.fullmatch(word)]
    if len(programs) > 1:
        found.differs[f"{len(programs)} programs of theirs"] = (
            "each has keys of its own; of those that differ the last are taken"
        )
    for program in programs:
        if any(name in program for name in _SAMPLERS_AHEAD):
            found.differs[program] = "it samples ahead; here rollout.max_staleness says how far, 0 unless it is set"
        elif not program.endswith(_SAME_PROGRAMS) and "sft_trainer" not in program:
            found.differs[program] = "another program than verl.trainer.main_ppo: what its keys say is translated alone"


def _set_algorithm(ends: Ends, found: Translation) -> None:
    if not ends.has("adv_estimator"):
        lost = next(key for key in found.unknown if "adv_estimator=" in key).partition(" ")[0]
        raise ConfigError(
            (
                f"their config has {lost}: only a shell knows its value, which is the algorithm; write it, or give "
                "the script",
            )
        )
    if ends.get("distillation.enabled", False):
        raise ConfigError(
            (
                "distillation.enabled=True: their run has a teacher, and this translation would leave it out; start "
                "from `rally config opd`, with teacher.path and teacher.loss (docs/distill.md)",
            )
        )
    verl = other_projects().verl
    name = str(ends.get("adv_estimator")).removesuffix("_vectorized")
    found.keys["recipe"] = "ppo" if name == "gae" else "grpo"
    if name in verl.advantages:
        found.keys["advantage.name"] = verl.advantages[name]
    elif name not in {"gae", "grpo"}:
        found.unknown.append(f"algorithm.adv_estimator={name}")
    if name == "gpg":
        found.open["algorithm.adv_estimator=gpg"] = (
            "advantage.name=dr_grpo is the same but for its factor, rows / rows with a score that is not 0"
        )
    mode = str(ends.get("policy_loss.loss_mode", "vanilla"))
    if mode in verl.losses:
        found.keys |= verl.losses[mode]
        if "aggregation" in verl.losses[mode]:
            found.open[f"{_ACTOR}.loss_agg_mode={ends.get('loss_agg_mode')}"] = (
                f"their {mode} is a mean of rows, always"
            )
            found.forget(f"{_ACTOR}.loss_agg_mode")
        named = {ours: ends.get(f"policy_loss.{name}") for name, ours in verl.covariance.get(mode, {}).items()}
        found.keys |= {f"loss.{ours}": value for ours, value in named.items() if value is not None}
    elif mode != "vanilla":
        found.unknown.append(f"policy_loss.loss_mode={mode}")


def _set_clip(ends: Ends, found: Translation) -> None:
    """Its bounds of each side go before that of both, and have values of their own where they are not given."""
    loss = str(found.keys.get("loss.name", "clip"))
    read = named_sections(RunConfig.model_fields["loss"])[loss].model_fields
    both, cap = ends.get("actor.clip_ratio"), ends.get("actor.clip_ratio_c")
    is_usual = [f"{_ACTOR}.clip_ratio_{side}=0.2" in found.usual for side in ("low", "high")]
    if any(is_usual) and both not in (None, 0.2):
        found.differs[f"actor.clip_ratio={both}"] = (
            "verl clips by clip_ratio_low and clip_ratio_high, which are 0.2 unless they are given, and never by this"
        )
    for name, side in (("clip_low", "low"), ("clip_high", "high")):
        bound = ends.get(f"actor.clip_ratio_{side}")
        bound = (0.2 if both is None else both) if bound is None else bound
        written = f"actor.clip_ratio_{side}={bound}"
        if name not in read:
            found.forget(f"{_ACTOR}.clip_ratio_{side}")
        elif isinstance(bound, int | float):
            most = next(cast("float", limit.le) for limit in read[name].metadata if isinstance(limit, Le))
            found.keys[f"loss.{name}"] = min(bound, most)
            if bound > most and most == 1:  # the ratio is never below 0
                found.open[written] = f"loss.{name}=1 is no bound, as theirs"
            elif bound > most:
                found.differs[written] = f"loss.{name} is at most {most}"
        else:
            found.differs[written] = f"loss.{name} is a number"
    if loss == "clip" and cap is not None:
        found.keys["loss.dual_clip"] = cap
    elif cap is not None and f"{_ACTOR}.clip_ratio_c={cap}" not in found.usual:
        found.open[f"actor.clip_ratio_c={cap}"] = "their loss of that name has no such bound"
    if loss != "clip":
        found.forget(f"{_ACTOR}.clip_ratio_c")


def _set_filter(ends: Ends, found: Translation) -> None:
    """Groups of equal scores are sampled anew; its number of batches is without a bound where it is 0."""
    if not ends.get("filter_groups.enable", False):
        ends.section("filter_groups")
        return
    most, metric = ends.get("filter_groups.max_num_gen_batches", 0), ends.get("filter_groups.metric", "acc")
    found.keys["rollout.dynamic_sampling"] = count_of(most) or _MOST_BATCHES
    if not count_of(most):
        found.open[f"filter_groups.max_num_gen_batches={most}"] = f"no bound there, {_MOST_BATCHES} batches here"
    if metric not in _SCORES:
        found.differs[f"filter_groups.metric={metric}"] = (
            "here groups are sampled anew whose scores are equal: the same if the score follows from it alone"
        )


def _set_kl(ends: Ends, found: Translation) -> None:
    """Its KL has two places, and each a switch, a coefficient and an estimator."""
    in_loss, in_reward = ends.get("actor.use_kl_loss", False), ends.get("algorithm.use_kl_in_reward")
    loss_coef, loss_kind = ends.get("actor.kl_loss_coef", 0.001), str(ends.get("actor.kl_loss_type", "low_var_kl"))
    is_coef_given = ends.has("algorithm.kl_ctrl.kl_coef")
    reward_coef, kind = ends.get("kl_ctrl.kl_coef", 0.001), ends.get("kl_ctrl.type", "fixed")
    adaptive = {
        name: ends.get(f"kl_ctrl.{theirs}") for name, theirs in (("target", "target_kl"), ("horizon", "horizon"))
    }
    if in_loss and loss_coef:
        estimators = other_projects().verl.estimators
        found.keys |= {"kl.placement": "loss", "kl.coef": loss_coef}
        if loss_kind.endswith("+"):
            found.keys["kl.estimator"] = "k2"
            found.open[f"actor.kl_loss_type={loss_kind}"] = "with + its gradient is that of k2, whatever is shown"
        elif loss_kind in estimators:
            found.keys["kl.estimator"] = estimators[loss_kind]
        else:
            found.unknown.append(f"actor.kl_loss_type={loss_kind}")
        if in_reward and reward_coef:
            found.differs["algorithm.use_kl_in_reward=True"] = "there is one KL, and kl.placement is loss"
    elif reward_coef and (in_reward or (in_reward is None and is_coef_given)):
        found.keys |= {"kl.placement": "reward", "kl.coef": reward_coef}
        if kind == "adaptive":
            usual = {"target": 0.1, "horizon": 10_000}
            found.keys |= {f"kl.adaptive.{name}": adaptive[name] or usual[name] for name in usual}
    else:
        found.keys["kl"] = None


def _set_batch(ends: Ends, found: Translation) -> None:
    """Its mini-batches count prompts, as its batch does; here a step is cut into a number of mini-batches."""
    prompts, actor = ends.get("data.train_batch_size"), ends.get("actor.ppo_mini_batch_size")
    sizes = {"actor": actor}
    critic, critic_epochs = ends.get("critic.ppo_mini_batch_size", actor), ends.get("critic.ppo_epochs")
    if found.keys["recipe"] == "ppo":
        sizes["critic"] = critic
        if (epochs := critic_epochs or ends.peek("actor.ppo_epochs")) is not None:
            found.keys["critic.num_epochs"] = epochs
    if isinstance(prompts, int):
        found.keys["rollout.num_prompts"] = prompts
    for role, size in sizes.items():
        if isinstance(prompts, int) and isinstance(size, int) and size:
            found.keys[f"{role}.num_mini_batches"] = max(1, -(-prompts // size))
        elif size is not None:
            found.open[f"{role}.ppo_mini_batch_size={size}"] = (
                f"{role}.num_mini_batches is data.train_batch_size divided by it"
            )
    tokens = ends.peek("actor.ppo_max_token_len_per_gpu")  # there of the part of each row that a GPU has
    parts = [ends.peek(f"actor.{name}", 1) for name in _CUTS_OF_ROWS]
    if all(isinstance(one, int) for one in (tokens, *parts)):
        ends.get("actor.ppo_max_token_len_per_gpu")
        found.keys["engine.max_tokens_per_micro_batch"] = tokens * math.prod(parts)
    if (sampled := ends.get("data.gen_batch_size")) is not None:
        found.open[f"data.gen_batch_size={sampled}"] = "prompts are sampled as they are needed, in no other batches"


def _set_length(ends: Ends, found: Translation) -> None:
    """A number of steps goes before one of epochs there."""
    steps, epochs = ends.get("trainer.total_training_steps"), ends.peek("trainer.total_epochs")
    if isinstance(steps, int):
        found.keys |= {"trainer.num_steps": steps, "trainer.num_epochs": None}
        if epochs is not None:
            ends.get("trainer.total_epochs")
            found.open[f"trainer.total_epochs={epochs}"] = "total_training_steps goes before it"
    of_roles = {"actor": "actor.optim", "critic": "critic.optim"}
    for role, keys in ({"actor": "optim"} if found.keys["recipe"] == "sft" else of_roles).items():
        warmup = ends.peek(f"{keys}.lr_warmup_steps")
        if isinstance(warmup, int) and (warmup <= 0 or isinstance(steps, int)):
            ends.get(f"{keys}.lr_warmup_steps")
            if warmup > 0:  # it goes before the ratio
                ends.get(f"{keys}.lr_warmup_steps_ratio")
                set_warmup(found, role, warmup, steps)


def _set_frame(ends: Ends, found: Translation) -> None:
    per_node, nodes = ends.get("trainer.n_gpus_per_node"), ends.get("trainer.nnodes", 1)
    device = ends.get("trainer.device")
    if isinstance(per_node, int) and isinstance(nodes, int):
        found.keys |= {"cluster.pools": {"main": [per_node] * nodes}, "cluster.device": "cuda"}
    if device in _DEVICES:
        found.keys["cluster.device"] = device
    elif device is not None:
        found.open[f"trainer.device={device}"] = f"expected {', '.join(_DEVICES)}; cluster.device is cuda"
        found.keys["cluster.device"] = "cuda"  # not cpu, which is what a config without it has
    path = ends.get("custom_reward_function.path")
    name = ends.get("custom_reward_function.name", "compute_score")
    if path:
        found.keys["reward.function"] = f"{path}:{name}"
        if arguments := ends.section("custom_reward_function.reward_kwargs"):
            found.keys["reward.parameters"] = nested(arguments)
    if ends.get("data.filter_overlong_prompts", False):
        found.keys["data.on_too_long"] = "drop"
        ends.get("data.truncation")
    for section in ("reward_model", "overlong_buffer", "overlong_buffer_cfg"):
        if not ends.get(f"{section}.enable", True):  # the others say nothing then
            ends.section(section)
    set_trackers(ends.get("trainer.logger"), found)


def _set_shards(ends: Ends, found: Translation) -> None:
    """Its FSDP shards over all ranks unless it is told a number."""
    pools = cast("Mapping[str, Sequence[int]]", found.keys.get("cluster.pools", {"main": [0]}))
    num_ranks, is_tuning = sum(pools["main"]), found.keys["recipe"] == "sft"
    for role, section in {"actor": "engine"}.items() if is_tuning else other_projects().verl.sharded.items():
        size = ends.get(f"{section}.fsdp_size", -1)
        if role == "critic":
            size = ends.get("critic.model.fsdp_config.fsdp_size", size)
        cut = ends.peek(f"{section.partition('.fsdp')[0]}.ulysses_sequence_parallel_size", 1)
        is_there = role == "actor" or (found.keys["recipe"] == "ppo" if role == "critic" else "kl.coef" in found.keys)
        if not is_there or not isinstance(size, int) or not isinstance(cut, int):
            continue
        if num_ranks == 0:
            shards = "as many as there are ranks" if size == -1 else str(size)
            found.open[f"{section}.fsdp_size={size}"] = f"{role}.mesh.dp_shard is {shards}, divided by mesh.sp"
        elif (shards := (num_ranks if size == -1 else min(size, num_ranks)) // cut) > 1:
            found.keys[f"{role}.mesh.dp_shard"] = shards


def _set_validation(ends: Ends, found: Translation) -> None:
    """Without a test_freq it validates before the first step alone, or its fine-tuning after the last one."""
    every, files = ends.peek("trainer.test_freq"), ends.peek("data.val_files")
    if not isinstance(every, int) or every > 0:
        return
    ends.get("trainer.test_freq")
    if not files:
        found.forget("trainer.test_freq")
    elif found.keys["recipe"] == "sft":
        found.keys["validation.every_steps"] = _NEVER
    else:
        ends.get("data.val_files")
        set_it = "for a validation at the start, every validation.every_steps and at the end, set data.validation"
        if ends.get("trainer.val_before_train", True):
            found.differs[f"data.val_files={files}"] = f"test_freq={every} is one validation, at the start; {set_it}"
        else:
            found.open[f"data.val_files={files}"] = f"with test_freq={every} there is no validation; {set_it}"
