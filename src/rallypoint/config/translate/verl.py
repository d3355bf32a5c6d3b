"""Configs of verl: what follows from several of its keys together, and which of its sections mean something else."""

from __future__ import annotations

import math
import os
import re

from rallypoint.config.translate import defaults
from rallypoint.config.translate.corrections import set_verl_corrections
from rallypoint.config.translate.reading import read_keys
from rallypoint.config.translate.references import with_referred
from rallypoint.config.translate.table import (
    Ends,
    Translation,
    by_table,
    name_doubtful,
    nested,
    set_trackers,
    set_warmup,
    take_unresolved,
    with_usual,
)
from rallypoint.config.translate.verl_sft import is_sft, set_sft
from rallypoint.errors import ConfigError

_LOSSES: dict[str, dict[str, object]] = {
    "gspo": {"loss.name": "gspo"},
    "cispo": {"loss.name": "cispo"},
    "sapo": {"loss.name": "sapo", "aggregation": "sequence"},  # here and below whatever loss_agg_mode says
    "geo_mean": {"loss.name": "gmpo", "aggregation": "sequence"},
    "gpg": {"loss.name": "policy_gradient"},
    "dppo_tv": {"loss.name": "dppo", "loss.divergence": "tv"},
    "dppo_kl": {"loss.name": "dppo", "loss.divergence": "kl"},
    "clip_cov": {"loss.name": "clip_cov"},
    "kl_cov": {"loss.name": "kl_cov"},
}
"""Its names of policy losses, besides `vanilla`."""
_OF_COVARIANCE = {
    "clip_cov": {"clip_cov_ratio": "fraction", "clip_cov_lb": "covariance_low", "clip_cov_ub": "covariance_high"},
    "kl_cov": {"kl_cov_ratio": "fraction", "ppo_kl_coef": "coef"},
}
"""The parameters of two of them."""
_ADVANTAGES = {
    name: name for name in ("rloo", "dr_grpo", "gdpo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
} | {"gpg": "dr_grpo"}
"""Its names of estimators, besides `gae` and `grpo`."""
_PROGRAM = re.compile(r"(verl|recipe)\.[\w.]*(main_\w+|sft_trainer\w*)")
_CUTS_OF_ROWS = ("ulysses_sequence_parallel_size", "megatron.context_parallel_size")
_DEVICES = ("cuda", "cpu", "xpu")
"""Its devices that torch knows by itself."""
_OF_REWARDS = frozenset(
    {
        "reward_model",
        "reward_manager",
        "reward_kwargs",
        "custom_reward_function",
        "overlong_buffer",
        "overlong_buffer_cfg",
    }
)
_ALONE = (
    "agent checkpoint_engine distillation global_profiler mtp multi_turn pf_ppo profile profiler qat ray_init "
    "ray_kwargs rollout_correction sandbox_fusion skip teacher_models trace transfer_queue turbo_config val_kwargs"
)
_APART = {"reward": _OF_REWARDS, "reward_model": _OF_REWARDS, **{name: frozenset({name}) for name in _ALONE.split()}}
"""Sections whose keys have names that others have, too: reward_model.rollout.n is not rollout.n."""


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
    given, script = read_keys(text)
    found = Translation(num_given=len(given))
    theirs = take_unresolved(with_referred(given, defaults.VERL, os.environ), found)
    if (files := theirs.pop("defaults", None)) is not None:
        found.open[f"defaults={files}"] = (
            "files that it names are not read; what stands only there is verl's default here"
        )
    if (num_programs := sum(_PROGRAM.fullmatch(word) is not None for word in script.words)) > 1:
        found.open[f"{num_programs} programs of theirs"] = (
            "each has keys of its own; of those that differ the last are taken"
        )
    is_tuning = is_sft(script.words, given)
    theirs = with_usual(theirs, defaults.VERL_SFT if is_tuning else defaults.VERL, given, found)
    ends = Ends(theirs)
    if is_tuning:
        found.keys["recipe"] = "sft"
    else:
        _set_algorithm(ends, found)
    if found.keys["recipe"] == "ppo":
        theirs = with_usual(theirs, defaults.VERL_CRITIC, given, found)
    if ends.get("trainer.total_training_steps") is None:
        theirs = with_usual(theirs, defaults.VERL_SFT_LENGTH if is_tuning else defaults.VERL_LENGTH, given, found)
    ends = Ends(theirs, ends.taken)
    if is_tuning:
        set_sft(ends, found)
    else:
        _set_kl(ends, found)
        set_verl_corrections(ends, found)
        _set_batch(ends, found)
    _set_length(ends, found)
    _set_frame(ends, found)
    name_doubtful(script, found)
    return by_table({key: value for key, value in theirs.items() if key not in ends.taken}, found, _APART)


def _set_algorithm(ends: Ends, found: Translation) -> None:
    if not ends.has("adv_estimator"):
        lost = next(key for key in found.unknown if "adv_estimator=" in key).partition(" ")[0]
        raise ConfigError(
            (
                f"their config has {lost}: only a shell knows its value, which is the algorithm; write it, or give "
                "the script",
            )
        )
    name = str(ends.get("adv_estimator")).removesuffix("_vectorized")
    found.keys["recipe"] = "ppo" if name == "gae" else "grpo"
    if name in _ADVANTAGES:
        found.keys["advantage.name"] = _ADVANTAGES[name]
    elif name not in {"gae", "grpo"}:
        found.unknown.append(f"algorithm.adv_estimator={name}")
    if name == "gpg":
        found.open["algorithm.adv_estimator=gpg"] = (
            "advantage.name=dr_grpo is the same but for its factor, rows / rows with a score that is not 0"
        )
    mode = str(ends.get("policy_loss.loss_mode", "vanilla"))
    if mode in _LOSSES:
        found.keys |= _LOSSES[mode]
        named = {ours: ends.get(f"policy_loss.{name}") for name, ours in _OF_COVARIANCE.get(mode, {}).items()}
        found.keys |= {f"loss.{ours}": value for ours, value in named.items() if value is not None}
    elif mode != "vanilla":
        found.unknown.append(f"policy_loss.loss_mode={mode}")


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
        estimators = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}
        estimator = estimators.get(loss_kind.removesuffix("+"), "k3")
        found.keys |= {"kl.placement": "loss", "kl.coef": loss_coef, "kl.estimator": estimator}
        if in_reward and reward_coef:
            found.open["algorithm.use_kl_in_reward=True"] = "there is one KL, and kl.placement is loss"
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
    for section in ("reward_model", "overlong_buffer", "overlong_buffer_cfg", "filter_groups"):
        if not ends.get(f"{section}.enable", True):  # the others say nothing then
            ends.section(section)
    set_trackers(ends.get("trainer.logger"), found)
    if ends.peek("trainer.test_freq") == -1:
        ends.get("trainer.test_freq")
        found.open["trainer.test_freq=-1"] = "without data.validation there is none"
