"""Configs of verl and TRL as ours: by the table that suggests keys for wrong names (`aliases.py`).

Owns: how their configs are written, and what follows from several of their keys together. A key that has no counterpart
is named, never left out in silence.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from rallypoint.config.aliases import SAME
from rallypoint.config.aliases_by_recipe import aliases_for
from rallypoint.config.fields import named_sections
from rallypoint.config.recipes import RECIPES
from rallypoint.config.source import to_yaml
from rallypoint.config.suggest import alias_of, assignments_of
from rallypoint.config.tree import RunConfig
from rallypoint.config.unread import unread_sections, why_unread
from rallypoint.errors import ConfigError

_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
_SAME = {name: alias for alias in SAME for name in alias.names.split()}

_CLASSES = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "RewardConfig": "reward_model",
    "GRPOConfig": "grpo",
    "RLOOConfig": "grpo",
    "PPOConfig": "ppo",
    "GKDConfig": "opd",
    "DistillationConfig": "opd",
}
"""TRL's classes of arguments, and the recipe of each."""
_COMMANDS = {
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "reward": "RewardConfig",
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
}
"""TRL's commands, and the class whose arguments each takes."""
_SIGNS = {
    "num_ppo_epochs": "PPOConfig",
    "num_generations": "GRPOConfig",
    "precompute_ref_log_probs": "DPOConfig",
    "center_rewards_coefficient": "RewardConfig",
    "lmbda": "GKDConfig",
    "packing": "SFTConfig",
    "assistant_only_loss": "SFTConfig",
    "completion_only_loss": "SFTConfig",
}
"""Arguments that only one of them has, for a command line or a file without its name."""

_LOSSES: dict[str, dict[str, object]] = {
    "gspo": {"loss.name": "gspo"},
    "cispo": {"loss.name": "cispo"},
    "sapo": {"loss.name": "sapo"},
    "geo_mean": {"loss.name": "gmpo"},
    "gpg": {"loss.name": "policy_gradient"},
    "dppo_tv": {"loss.name": "dppo", "loss.divergence": "tv"},
    "dppo_kl": {"loss.name": "dppo", "loss.divergence": "kl"},
    "clip_cov": {"loss.name": "clip_cov"},
    "kl_cov": {"loss.name": "kl_cov"},
}
"""verl's names of policy losses, besides `vanilla`."""
_OF_COVARIANCE = {
    "clip_cov": {"clip_cov_ratio": "fraction", "clip_cov_lb": "covariance_low", "clip_cov_ub": "covariance_high"},
    "kl_cov": {"kl_cov_ratio": "fraction", "ppo_kl_coef": "coef"},
}
"""Their parameters of two of them."""
_OF_ENGINES = ("engine_kwargs", "override_transformer_config")
"""Sections of verl's that hold keys of other programs."""

Keys = dict[str, object]
"""Their dotted keys with values."""


@dataclasses.dataclass(slots=True)
class Translation:
    """What their keys are here."""

    keys: dict[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Ours, dotted."""
    open: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Theirs, as written, and what is said of them: they need no key, or one that depends on more than their value."""
    unknown: list[str] = dataclasses.field(default_factory=list[str])
    """Theirs that nothing is known of, as written."""

    @property
    def num_known(self) -> int:
        """Keys of theirs that were understood."""
        return self.num_given - len(self.unknown)

    num_given: int = 0

    def as_yaml(self) -> str:
        """Return a config file, which says at its end what became of the other keys."""
        recipe = self.keys.get("recipe", "ppo")
        lines = [f"# {self.num_known} of {self.num_given} keys are known.", f"base: {recipe}"]
        tree: dict[str, Any] = {}
        for dotted, value in self.keys.items():
            *sections, name = dotted.split(".")
            inside = tree
            for section in sections:
                inside = inside.setdefault(section, {})
            inside[name] = value
        tree.pop("recipe", None)
        lines += [to_yaml(tree).rstrip()] if tree else []
        for title, said in (
            ("Not set here, because", [f"{key}: {why}" for key, why in self.open.items()]),
            ("Without a counterpart", self.unknown),
        ):
            lines += [f"# {title}:", *(f"#   {line}" for line in said)] if said else []
        return "\n".join(lines) + "\n"


def from_verl(text: str) -> Translation:
    """Translate a command line of verl's, or a YAML file by its name.

    >>> from_verl("algorithm.adv_estimator=grpo data.train_batch_size=64 actor_rollout_ref.rollout.n=5").keys
    {'recipe': 'grpo', 'kl': None, 'rollout.num_prompts': 64, 'rollout.group_size': 5}

    Raises:
        ConfigError: it cannot be read.
    """
    theirs = _keys(text)
    found = Translation(num_given=len(theirs))
    taken = _of_verl_together(theirs, found)
    return _by_table({key: value for key, value in theirs.items() if key not in taken}, found)


def from_trl(text: str) -> Translation:
    """Translate arguments of one of TRL's classes: as Python has them, as a command line, or a YAML file.

    >>> from_trl("GRPOConfig(num_generations=8, beta=0.04, learning_rate=1e-6)").keys
    {'recipe': 'grpo', 'rollout.group_size': 8, 'kl.coef': 0.04, 'actor.optimizer.lr': 1e-06}
    >>> from_trl('DPOConfig(beta=0.2, loss_type="ipo")').keys
    {'recipe': 'dpo', 'preference.beta': 0.2, 'preference.name': 'ipo'}

    Raises:
        ConfigError: it cannot be read, or is of a class that no recipe stands for.
    """
    call = re.match(r"\s*(?:\w+\s*=\s*)?(?:\w+\.)*(\w+)\(", text)
    command = re.match(r"\s*trl\s+(\w+)\s", text)
    if call is None:
        rest = text[command.end() :] if command else text
        theirs = _keys(rest.replace("--", " "), in_pairs="=" not in rest)
        sign = next((kind for name, kind in _SIGNS.items() if name in theirs), "GRPOConfig")
        kind = _COMMANDS.get(command[1], command[1]) if command else sign
    else:
        theirs, kind = _arguments(text), call[1]
    if kind not in _CLASSES:
        raise ConfigError((f"no recipe stands for TRL's {kind}; expected one of {', '.join(_CLASSES)}",))
    found = Translation(num_given=len(theirs))
    found.keys["recipe"] = _CLASSES[kind]
    taken = _of_trl_together(theirs, found, kind)
    return _by_table({key: value for key, value in theirs.items() if key not in taken}, found)


def _by_table(theirs: Keys, found: Translation) -> Translation:
    known = {**_SAME, **aliases_for(str(found.keys["recipe"]))}
    for key, value in theirs.items():
        written = f"{key}={value}"
        parts = key.split(".")
        around = next((parts[: place + 1] for place, part in enumerate(parts) if part in _OF_ENGINES), parts)
        alias = alias_of(parts, known)[0] or alias_of(around, known)[0]
        if alias is None:
            found.unknown.append(written)
            continue
        assignments = assignments_of(alias, parts, value)
        whole = [one.partition("=") for one in assignments if "=" in one]
        if not whole:
            found.open[written] = alias.note or f"see {', '.join(assignments)}"
        for dotted, _, text in whole:
            found.keys[dotted] = yaml.safe_load(text)
            if isinstance(found.keys[dotted], str):  # such as 1e-6, which is text for plain YAML
                found.keys[dotted] = value if str(value) == text else found.keys[dotted]
    kinds = named_sections(RunConfig.model_fields["loss"])
    loss = str(found.keys.get("loss.name", "clip"))
    for dotted in [key for key in found.keys if key.startswith("loss.") and key[5:] not in kinds[loss].model_fields]:
        found.open[f"{dotted}={found.keys.pop(dotted)}"] = f"loss.name={loss} has no such key"
    if found.keys["recipe"] != "ppo":
        for dotted in [key for key in found.keys if key.startswith(("critic.", "advantage.gae_lambda"))]:
            found.open[f"{dotted}={found.keys.pop(dotted)}"] = f"{found.keys['recipe']} has no critic"
    unread = unread_sections(RunConfig.model_validate({"recipe": found.keys["recipe"]}))
    for dotted in [key for key in found.keys if (why_unread(unread, key) or "").startswith("recipe=")]:
        found.open[f"{dotted}={found.keys.pop(dotted)}"] = f"{found.keys['recipe']} does not read it"
    return found


def _of_verl_together(theirs: Keys, found: Translation) -> set[str]:
    """Translate the keys of verl's that mean something only together; return them."""
    get, taken = _ends(theirs)
    _algorithm_of_verl(theirs, get, found)
    _divide_batch(get("data.train_batch_size", None), get("actor.ppo_mini_batch_size", None), found)
    per_node, nodes = get("n_gpus_per_node", None), get("trainer.nnodes", 1)
    if isinstance(per_node, int) and isinstance(nodes, int):
        found.keys |= {"cluster.pools": {"main": [per_node] * nodes}, "cluster.device": "cuda"}
    path, name = get("custom_reward_function.path", None), get("custom_reward_function.name", "compute_score")
    if path:
        found.keys["reward.function"] = f"{path}:{name}"
    if get("data.filter_overlong_prompts", False):
        found.keys["data.on_too_long"] = "drop"
        get("data.truncation", None)
    for section in ("reward_model", "overlong_buffer", "overlong_buffer_cfg", "filter_groups"):
        if not get(f"{section}.enable", True):  # the others say nothing then
            taken.update(key for key in theirs if f".{section}." in f".{key}")
    if (sampled := get("data.gen_batch_size", None)) is not None and "data.train_batch_size" in theirs:
        found.open[f"data.gen_batch_size={sampled}"] = "prompts are sampled as they are needed, in no other batches"
    _trackers(get("trainer.logger", None), found)
    if theirs.get("trainer.test_freq") == -1:
        get("trainer.test_freq", None)
        found.open["trainer.test_freq=-1"] = "without data.validation there is none"
    return taken


def _algorithm_of_verl(theirs: Keys, get: Callable[[str, object], Any], found: Translation) -> None:
    in_loss, in_reward = get("actor.use_kl_loss", False), get("algorithm.use_kl_in_reward", None)
    loss_coef, loss_kind = get("actor.kl_loss_coef", 0.001), str(get("actor.kl_loss_type", "low_var_kl"))
    reward_coef = get("kl_ctrl.kl_coef", 0.001)
    name = str(get("adv_estimator", "gae"))
    found.keys["recipe"] = "ppo" if name == "gae" else "grpo"
    if name in {"rloo", "dr_grpo", "gdpo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}:
        found.keys["advantage.name"] = name
    elif name not in {"gae", "grpo"}:
        found.unknown.append(f"algorithm.adv_estimator={name}")
    mode = str(get("policy_loss.loss_mode", "vanilla"))
    if mode in _LOSSES:
        found.keys |= _LOSSES[mode]
        named = {ours: get(f"policy_loss.{name}", None) for name, ours in _OF_COVARIANCE.get(mode, {}).items()}
        found.keys |= {f"loss.{ours}": value for ours, value in named.items() if value is not None}
    elif mode != "vanilla":
        found.unknown.append(f"policy_loss.loss_mode={mode}")
    if in_loss and loss_coef:
        estimators = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}
        estimator = estimators.get(loss_kind.removesuffix("+"), "k3")
        found.keys |= {"kl.placement": "loss", "kl.coef": loss_coef, "kl.estimator": estimator}
    elif reward_coef and (in_reward or (in_reward is None and "algorithm.kl_ctrl.kl_coef" in theirs)):
        found.keys |= {"kl.placement": "reward", "kl.coef": reward_coef}
    else:
        found.keys["kl"] = None


def _trackers(theirs: object, found: Translation) -> None:
    """Both have one name or several, and names of what is written in any case."""
    names = cast("list[object]", theirs) if isinstance(theirs, list) else [theirs]
    ours = [name for name in names if name in _TRACKERS]
    if ours:
        found.keys["tracking.to"] = ours


def _divide_batch(prompts: object, mini_batch: object, found: Translation) -> None:
    """Both count prompts in verl; here a step is cut into a number of mini-batches."""
    if isinstance(prompts, int):
        found.keys["rollout.num_prompts"] = prompts
    if isinstance(prompts, int) and isinstance(mini_batch, int) and mini_batch:
        found.keys["actor.num_mini_batches"] = max(1, -(-prompts // mini_batch))
    elif mini_batch is not None:
        found.open[f"ppo_mini_batch_size={mini_batch}"] = "actor.num_mini_batches: batch divided by mini-batch"


def _of_trl_together(theirs: Keys, found: Translation, kind: str) -> set[str]:
    """Translate the keys of TRL's that mean something only together; return them."""
    get, taken = _ends(theirs)
    rows = [get(name, 1) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    is_of_files = RECIPES[_CLASSES[kind]].examples != "prompts"
    usual = {"GRPOConfig": 8, "RLOOConfig": 2}.get(kind, 1)
    group = 1 if is_of_files or kind == "PPOConfig" else theirs.get("num_generations", usual)
    if taken and all(isinstance(one, int) for one in (*rows, group)):
        per_process, steps, size = cast("list[int]", [*rows, group])
        key = "data.num_examples" if is_of_files else "rollout.num_prompts"
        found.keys[key] = max(1, per_process * steps // size)
        by_group = "" if is_of_files else f" / {size}"
        found.open["per_device_train_batch_size x gradient_accumulation_steps"] = (
            f"{key} is {per_process} x {steps}{by_group} for one process of theirs; multiply it by theirs"
        )
    _trackers(get("report_to", None), found)
    if theirs.get("max_steps") == -1:
        get("max_steps", None)
        found.open["max_steps=-1"] = "trainer.num_epochs sets the length"
    elif is_of_files and "max_steps" in theirs:
        found.keys["trainer.num_epochs"] = None  # or it would set the length
    if kind == "PPOConfig" and isinstance(num := get("num_mini_batches", None), int):
        found.keys |= {"actor.num_mini_batches": num, "critic.num_mini_batches": num}
    elif kind == "GRPOConfig" and "beta" not in theirs:
        found.keys["kl"] = None
    elif kind == "RLOOConfig":
        found.keys["advantage.name"] = "rloo"
        if theirs.get("beta") not in (0, 0.0):
            found.keys |= {"kl.placement": "reward", "kl.coef": theirs.get("beta", 0.05)}
    return taken


def _ends(theirs: Keys) -> tuple[Callable[[str, object], Any], set[str]]:
    """Return what looks a key up by its end, and the set of keys that it has found."""
    taken: set[str] = set()

    def get(end: str, usual: object) -> Any:
        for key, value in theirs.items():
            if f".{key}".endswith(f".{end}"):
                taken.add(key)
                return value
        return usual

    return get, taken


def _keys(text: str, *, in_pairs: bool = False) -> Keys:
    """Read `key=value`, or `key value`, of a command line, or a YAML file."""
    path = Path(text.strip())
    try:
        if path.suffix in {".yaml", ".yml"}:
            return dict(_leaves(yaml.safe_load(path.read_text(encoding="utf-8"))))
        words = shlex.split(os.path.expandvars(text).replace("\\\n", " "), comments=True)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError((f"their config cannot be read: {error}",)) from None
    found: Keys = {}
    for place, word in enumerate(words):
        key, equals, value = word.lstrip("+").partition("=")
        if equals and re.fullmatch(r"[A-Za-z_][\w.]*", key):
            found[key] = _value(value)
        elif in_pairs and place % 2 == 0:
            found[key] = _value(words[place + 1]) if place + 1 < len(words) else True
    if not found:
        raise ConfigError(("their config has no key=value",))
    return found


def _value(text: str) -> object:
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _arguments(text: str) -> Keys:
    """Read the arguments of a call in Python; what is no literal stays as it is written."""
    try:
        node = ast.parse(text.strip()).body[0]
    except (SyntaxError, IndexError) as error:
        raise ConfigError((f"their config cannot be read as Python: {error}",)) from None
    call = cast("ast.Assign | ast.Expr", node).value
    found: Keys = {}
    for keyword in cast("ast.Call", call).keywords:
        if keyword.arg is not None:
            written = ast.unparse(keyword.value)
            try:
                found[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError:
                found[keyword.arg] = written
    return found


def _leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(tree, Mapping):
        for name, inner in cast("Mapping[str, object]", tree).items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree
