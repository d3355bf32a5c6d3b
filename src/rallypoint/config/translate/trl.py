"""Configs of TRL: what follows from several of its arguments together."""

from __future__ import annotations

import math
import re
from pathlib import Path

from rallypoint.config.other_projects import other_projects
from rallypoint.config.recipes import RECIPES
from rallypoint.config.translate.corrections import set_trl_corrections
from rallypoint.config.translate.reading import CALL, PEFT, Keys, flags_of, read_arguments
from rallypoint.config.translate.shell import ShellScript
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
from rallypoint.config.translate.trl_script import read_trl_script, script_in
from rallypoint.errors import ConfigError

_CLASS = re.compile(r"(\w+\.)*[A-Z]\w*(Config|Trainer)")
_NAMES = ("trainer", "trainer_class", "trainer_type", "trainer_name", "config_class", "class", "type", "_target_")
"""Keys of files that say which class they are for."""
_OTHERS = ("LoraConfig", "ModelConfig", "BitsAndBytesConfig")
"""Classes that a command line names together with those of arguments."""
_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")


def from_trl(text: str) -> Translation:
    """Translate arguments of one of TRL's classes: as Python has them, as a command line, or a file by its name.

    >>> found = from_trl("GRPOConfig(num_generations=4, beta=0.04, learning_rate=1e-5)")
    >>> [found.keys[name] for name in ("recipe", "rollout.group_size", "kl.coef", "actor.optimizer.lr")]
    ['grpo', 4, 0.04, 1e-05]
    >>> "num_train_epochs=3" in found.usual
    True

    Raises:
        ConfigError: it cannot be read, or is of a class that no recipe stands for.
    """
    trl = other_projects().trl
    file = None if re.match(CALL, text) else script_in(text.split())
    if file is not None:
        own = read_trl_script(file, flags_of(text.split()), trl.classes)
        given, script, kind = own.keys, ShellScript({}), _supported(own.kind)
        found = Translation(own.ours, differs=own.lost, num_given=len(given))
    else:
        given, script = read_arguments(text)
        kind = _class(text, given, script)
        found = Translation(num_given=len(given))
    if kind is None:
        kind = "GRPOConfig"
        found.differs[kind] = (
            "nothing says which class it is; for another one, give the command, such as 'trl sft --config theirs.yaml'"
        )
    given = {key.removeprefix(f"{kind}."): value for key, value in given.items() if not _names_class(key, value)}
    found.keys["recipe"] = recipe = trl.classes[kind]
    theirs = take_unresolved(given, found)
    theirs = with_usual(theirs, {**trl.defaults_of_all, **trl.defaults[kind]}, given, found)
    theirs = _with_switched(kind, theirs, given, found)
    if count_of(theirs.get("max_steps")) is None and count_of(theirs.get("total_episodes")) is None:
        theirs = with_usual(theirs, trl.defaults_length, given, found)
    ends = Ends(theirs)
    _set_optimizer(ends, found)
    if RECIPES[recipe].examples != "prompts":
        num_updates = _set_examples(ends, found)
    elif kind == "PPOConfig":
        num_updates = _set_ppo(ends, found)
    else:
        num_updates = _set_samples(ends, found)
    _set_kind(kind, ends, found)
    _name_differences(kind, ends, found)
    _set_reference(ends, found, num_updates)
    _set_length(ends, found, num_updates)
    _set_lora(ends, found)
    set_trackers(ends.get("report_to"), found)
    name_doubtful(script, found)
    by_table({key: value for key, value in theirs.items() if key not in ends.taken}, found, {})
    if kind == "PPOConfig":  # policy and value have one optimizer there
        of_actor = {key: value for key, value in found.keys.items() if key.startswith("actor.optimizer.")}
        found.keys |= {f"critic.{key.removeprefix('actor.')}": value for key, value in of_actor.items()}
    return found


def _with_switched(kind: str, theirs: Keys, given: Keys, found: Translation) -> Keys:
    """Return their keys with those that a switch brings: an adapter's, and the weights of what vLLM has sampled."""
    trl = other_projects().trl
    if theirs.get("use_peft"):
        usual = trl.defaults_peft if theirs["use_peft"] == PEFT else trl.defaults_lora
        theirs = with_usual(theirs, usual, given, found)
    if kind == "GRPOConfig" and theirs.get("use_vllm"):
        older = "vllm_importance_sampling_cap" in given
        usual = {key: value for key, value in trl.defaults_vllm.items() if not (older and key.endswith("clip_max"))}
        theirs = with_usual(theirs, usual, given, found)
    return theirs


def _class(text: str, given: Keys, script: ShellScript) -> str | None:
    """Return the class that is called or named, whose command or script it is, or one of whose arguments is given."""
    commands = other_projects().trl.commands
    call = re.match(CALL, text)
    place = script.words.index("trl") if "trl" in script.words[:-1] else None
    program = next((Path(word).stem for word in script.words if word.endswith(".py")), "")
    words = [word for word in sorted(commands, key=len, reverse=True) if f"_{word}_" in f"_{program}_"]
    if call:
        kind = call[1]
    elif place is not None:
        kind = commands.get(script.words[place + 1], script.words[place + 1])
    elif words:
        kind = commands[words[0]]
    else:
        named = [str(value) for key, value in given.items() if _names_class(key, value)]
        sections = [key.partition(".")[0] for key in given]
        named += [name for name in sections if _CLASS.fullmatch(name) and name not in _OTHERS]
        named += [kind for name, kind in other_projects().trl.signs.items() if name in given]
        if not named:
            return None
        kind = named[0].rpartition(".")[2].replace("Trainer", "Config")
    return _supported(kind)


def _supported(kind: str) -> str:
    classes = other_projects().trl.classes
    if kind not in classes:
        raise ConfigError((f"no recipe stands for TRL's {kind}; expected one of {', '.join(classes)}",))
    return kind


def _names_class(key: str, value: object) -> bool:
    """Whether a file says by this key which class it is for.

    >>> _names_class("trainer", "trl.DPOTrainer"), _names_class("config_class", "DPOConfig"), _names_class("beta", 0.1)
    (True, True, False)
    """
    return key in _NAMES and _CLASS.fullmatch(str(value)) is not None


def _set_examples(ends: Ends, found: Translation) -> int:
    per_process, accumulated = _rows(ends, found)
    if per_process and accumulated:
        found.keys["data.num_examples"] = per_process * accumulated
        _say_rows(found, f"data.num_examples is {per_process} x {accumulated}")
    return 1


def _set_samples(ends: Ends, found: Translation) -> int:
    """Its steps are optimizer steps; here a step is all that is done with the rollouts that are sampled at once.

    Returns:
        Their steps in one of ours.
    """
    per_process, accumulated = _rows(ends, found)
    per_sampling, rows = count_of(ends.get("steps_per_generation")), count_of(ends.get("generation_batch_size"))
    found.keys["rollout.group_size"] = ends.peek("num_generations", 1)
    group = count_of(found.keys["rollout.group_size"])
    if not (per_process and accumulated and group):
        return 1
    said = f"{rows}"
    if rows is None:
        rows, said = per_process * (per_sampling or accumulated), f"{per_process} x {per_sampling or accumulated}"
    num_mini_batches = max(1, rows // (per_process * accumulated))
    found.keys["rollout.num_prompts"] = max(1, rows // group)
    if num_mini_batches > 1:
        found.keys["actor.num_mini_batches"] = num_mini_batches
    _say_rows(found, f"rollout.num_prompts is {said} / {group}")
    return num_mini_batches * (count_of(ends.peek("num_iterations")) or 1)


def _set_ppo(ends: Ends, found: Translation) -> int:
    """Its PPO samples one response to a prompt, and counts the rollouts of the whole run."""
    rows = _rows(ends, found)
    found.keys["rollout.group_size"] = 1
    if (num := count_of(ends.get("num_mini_batches"))) is not None:
        found.keys |= {"actor.num_mini_batches": num, "critic.num_mini_batches": num}
    if (epochs := count_of(ends.peek("num_ppo_epochs"))) is not None:
        found.keys["critic.num_epochs"] = epochs
    if not (rows[0] and rows[1]):
        return 1
    batch = rows[0] * rows[1]
    found.keys["rollout.num_prompts"] = batch
    _say_rows(found, f"rollout.num_prompts is {rows[0]} x {rows[1]}")
    if (episodes := count_of(ends.peek("total_episodes"))) is not None:
        ends.get("total_episodes")
        ends.get("num_train_epochs")
        found.keys |= {"trainer.num_steps": math.ceil(episodes / batch), "trainer.num_epochs": None}
        found.open[f"total_episodes={episodes}"] = (
            f"trainer.num_steps is {episodes} / {batch} rollouts of a step; divide it by their processes"
        )
    return 1


def _rows(ends: Ends, found: Translation) -> tuple[int | None, int | None]:
    """Return rows of a process and how often they are accumulated; what is not a count is named."""
    given = {name: ends.get(name, 1) for name in _ROWS}
    found.unknown += [f"{name}={value}" for name, value in given.items() if count_of(value) is None]
    return count_of(given[_ROWS[0]]), count_of(given[_ROWS[1]])


def _say_rows(found: Translation, said: str) -> None:
    found.open[" x ".join(_ROWS)] = f"{said} for one process of theirs; multiply it by theirs"


def _set_kind(kind: str, ends: Ends, found: Translation) -> None:
    """Set what the class says by itself: its KL, its advantages and its loss."""
    if kind in {"PPOConfig", "RLOOConfig"}:
        name = "kl_coef" if kind == "PPOConfig" else "beta"
        coef = ends.get(name)
        found.keys |= {"kl.placement": "reward", "kl.coef": coef} if coef else {"kl": None}
    if kind == "RLOOConfig":
        found.keys |= {"advantage.name": "rloo", "aggregation": "fixed_length"}
    if kind == "GRPOConfig":
        beta = ends.peek("beta")
        if not isinstance(beta, int | float) or beta <= 0:
            ends.get("beta")
            found.keys["kl"] = None
            found.open |= {f"beta={beta}": "a KL has a weight above 0"} if beta else {}
        _set_loss(ends, found)


def _set_loss(ends: Ends, found: Translation) -> None:
    level, kind = ends.get("importance_sampling_level", "token"), str(ends.get("loss_type", "dapo"))
    aggregation = other_projects().trl.aggregations.get(kind)
    if aggregation is None:
        found.unknown.append(f"loss_type={kind}")
    else:
        found.keys["aggregation"] = aggregation
    if level == "sequence":
        found.keys["loss.name"] = "gspo"
    elif level != "token":
        found.unknown.append(f"importance_sampling_level={level}")
    elif kind == "sapo":
        taus = {
            "tau_positive": ends.get("sapo_temperature_pos", 1.0),
            "tau_negative": ends.get("sapo_temperature_neg", 1.05),
        }
        found.keys |= {"loss.name": kind, **{f"loss.{tau}": taus[tau] for tau in taus}}
    elif kind == "cispo":
        bound = ends.get("epsilon_high", ends.get("epsilon"))
        found.keys |= {"loss.name": kind, "loss.clip_low": 1.0}
        if isinstance(bound, int | float) and bound > 1:
            found.keys["loss.clip_high"] = round(bound - 1, 6)
        found.open[f"epsilon_high={bound}"] = "it bounds the weight itself, loss.clip_high what it may be above 1"
    if ends.get("multi_objective_aggregation") == "normalize_then_sum":
        found.keys["advantage.name"] = "gdpo"
        ends.get("scale_rewards")  # which says nothing then
    set_trl_corrections(ends, found)


def _name_differences(kind: str, ends: Ends, found: Translation) -> None:
    """Name what the class computes by itself and no key of ours can say."""
    if kind == "RLOOConfig":
        found.differs["RLOOConfig"] = (
            "its ratio is that of a whole row, here each token has its own: the same in the first update of a batch "
            "only; its loss is a sum over a row's tokens, here divided by rollout.max_response_tokens"
        )
    if kind == "SFTConfig" and not (ends.peek("assistant_only_loss") or ends.peek("completion_only_loss")):
        found.differs["SFTConfig"] = (
            "of a conversation (messages) it trains all tokens, here those of the assistant alone, as with "
            "assistant_only_loss=True; of prompt and completion both train the completion"
        )
    if kind == "RewardConfig":
        found.keys["data.on_too_long"] = "drop"
    if kind == "GKDConfig" and (part := ends.get("lmbda")) != 1:
        found.differs[f"lmbda={part}"] = (
            "this part of its batches is sampled by the student, the others are the data's own answers; here the "
            "student samples all"
        )
        found.forget("lmbda")
    if ends.get("seq_kd", False):
        found.differs["seq_kd=True"] = "there the teacher samples the other answers; here the student samples all"
    if found.keys["recipe"] == "opd" and (beta := ends.peek("beta")) not in (0, 1):
        ends.get("beta")
        found.keys["teacher.loss"] = "mixed"
        found.differs[f"beta={beta}"] = "a Jensen-Shannon divergence there; teacher.loss=mixed is the mean of both KLs"
    if ends.has("eval_dataset") and ends.get("eval_strategy", "no") == "no":
        found.open[f"eval_dataset={ends.get('eval_dataset')}"] = "it is not used without eval_strategy"


def _set_lora(ends: Ends, found: Translation) -> None:
    """Its commands have keys of an adapter that say nothing without a switch."""
    keys = [
        name
        for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters")
        if ends.has(name)
    ]
    if not ends.get("use_peft", False):
        found.open |= {f"{name}={ends.get(name)}": "it says nothing without use_peft" for name in keys}
        return
    if dropout := ends.get("lora_dropout"):
        found.differs[f"lora_dropout={dropout}"] = "adapters are trained without dropout"
    if ends.peek("lora_target_modules") is None:
        ends.get("lora_target_modules")
        found.keys["model.lora.target_modules"] = ["q_proj", "v_proj"]
        found.differs["lora_target_modules=None"] = (
            "PEFT chooses by the model: q_proj and v_proj of Llama, Qwen, Mistral and Gemma, which are set here; other "
            "families have others"
        )


def _set_reference(ends: Ends, found: Translation, num_updates: int) -> None:
    if ends.get("sync_ref_model", False):
        every, alpha = count_of(ends.get("ref_model_sync_steps")) or 512, ends.get("ref_model_mixup_alpha", 0.6)
        found.keys["reference.refresh_every_steps"] = max(1, every // num_updates)
        if alpha != 1:
            found.differs[f"ref_model_mixup_alpha={alpha}"] = "the reference takes over the actor's weights, as with 1"
        return
    for name in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
        if ends.has(name):
            found.open[f"{name}={ends.get(name)}"] = "it says nothing without sync_ref_model"


def _set_length(ends: Ends, found: Translation, num_updates: int) -> None:
    """A number of steps goes before one of epochs there."""
    steps, warmup = count_of(ends.peek("max_steps")), count_of(ends.peek("warmup_steps"))
    for name, ours in (("save_steps", "checkpoint.every_steps"), ("eval_steps", "validation.every_steps")):
        if num_updates > 1 and (every := count_of(ends.peek(name))) is not None:
            ends.get(name)
            found.keys[ours] = max(1, every // num_updates)
    if num_updates > 1:
        found.open["steps of theirs"] = f"they are optimizer steps, of which a step here has {num_updates}"
    if steps is not None:
        ends.get("max_steps")
        found.keys |= {"trainer.num_steps": math.ceil(steps / num_updates), "trainer.num_epochs": None}
        if ends.has("num_train_epochs"):
            found.open[f"num_train_epochs={ends.get('num_train_epochs')}"] = "max_steps goes before it"
        if warmup is not None:
            ends.get("warmup_steps")
            set_warmup(found, "actor", warmup, steps)
    elif ends.has("max_steps"):
        found.open[f"max_steps={ends.get('max_steps')}"] = "trainer.num_epochs sets the length"


def _set_optimizer(ends: Ends, found: Translation) -> None:
    found.keys["actor.optimizer.betas"] = [ends.get("adam_beta1"), ends.get("adam_beta2")]
    if ends.has("bf16") and ends.peek("fp16") is False:  # both are given, as a rule
        ends.get("fp16")
