"""Contradictions between keys: each is one function that yields problems, with the keys it looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rallypoint.config.check_placement import placement_contradictions, way_of_weights
from rallypoint.config.check_sampling_ahead import ahead_contradictions
from rallypoint.config.fields import Problem, shown
from rallypoint.config.limits import BLOCK_TOKENS, MIN_TEMPERATURE, MOST_VLLM_RANK
from rallypoint.config.recipes import RECIPES
from rallypoint.config.sections.material import LoRAConfig, path_of, weight_of
from rallypoint.config.shape import known_adapter, shape_of
from rallypoint.config.tree import RunConfig, row_limit
from rallypoint.config.unread import without_effect
from rallypoint.families import FAMILIES, MIXTURES
from rallypoint.transport_kinds import FOLDER, TRANSPORT_KINDS

_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dims that vLLM's attention takes on CPUs."""


def contradictions(config: RunConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the contradictions between keys that are right by themselves."""
    yield from _either_or(config)
    yield from _mixture(config)
    yield from _reward(config)
    for check in RECIPES[config.recipe].checks:
        yield from check(config)
    yield from _batch(config)
    if "rollout" in config.roles:
        yield from _sampling(config)
        yield from _shaping(config)
    yield from _created_model(config)
    yield from _tokenizer(config)
    yield from _lora(config)
    yield from placement_contradictions(config)
    yield from ahead_contradictions(config)
    yield from _profiled(config)
    yield from without_effect(config, origins)


def _either_or(config: RunConfig) -> Iterator[Problem]:
    model, data = config.model, config.data
    if model.path is None and model.create is None:
        yield Problem.of(
            "^model.path: required, but not set; expected the Hugging Face folder of a causal language model, or "
            "^model.create={} for a small new one",
            is_missing=True,
        )
    if model.path is not None and model.create is not None:
        yield Problem.of(
            f"^model.path={model.path!r} contradicts ^model.create, which makes a new model: add model.create=null"
        )
    if not data.train and data.generate is None:
        yield Problem.of(
            "^data.train: required, but not set; expected files, folders or names on the hub, or ^data.generate={} "
            "for digit tasks",
            is_missing=True,
        )
    if data.train and data.generate is not None:
        yield Problem.of(
            f"^data.train={path_of(data.train[0])!r} contradicts ^data.generate, which makes a new data set: add "
            "data.generate=null"
        )
    if data.generate is not None and config.trains_on_files and not data.train:
        yield Problem.of(
            f"^data.generate makes prompts for rewards, and ^recipe={config.recipe} trains on answers as they are: set "
            "data.train, and data.generate=null"
        )
    if data.validation and data.generate is not None and not data.train:
        yield Problem.of(
            f"^data.validation={path_of(data.validation[0])!r} contradicts ^data.generate, which makes validation "
            "prompts too: add data.generate=null"
        )
    if config.checkpoint.keep_best and data.generate is None and not data.validation:
        yield Problem.of(
            "^checkpoint.keep_best=true has no effect without a validation, whose score says which step is best: set "
            "^data.validation, or checkpoint.keep_best=false"
        )


def _profiled(config: RunConfig) -> Iterator[Problem]:
    named, steps, last = config.trainer.profile, config.trainer.profiled, config.trainer.num_steps
    if named is not None and not (0 < len(steps) <= 20 and steps.start >= 1 and steps.stop - 1 <= last):
        said = f"trainer.profile={named!r}: expected at most 20 steps from 1 to {last} as FIRST:LAST, such as 3:5"
        yield Problem(("trainer.profile", "trainer.num_steps"), said)


def _mixture(config: RunConfig) -> Iterator[Problem]:
    """Yield data sets of which some have a weight, and what a set has that nothing reads."""
    weights = {path_of(one): weight_of(one) for one in config.data.train}
    if None in weights.values() and any(weights.values()):
        without = ", ".join(path for path, weight in weights.items() if weight is None)
        yield Problem.of(
            f"^data.train: {without} has no weight, and others have; expected one for each, or for none: then they are "
            "one set, and each prompt occurs once an epoch"
        )
    for one in (*config.data.train, *config.data.validation):
        if not isinstance(one, str) and one.parameters and not one.path.startswith(("reasoning_gym:", "games:")):
            yield Problem(("data.train",), f"{one.path} has parameters, which only generators read: reasoning_gym:NAME")
    for one in (*config.data.train, *config.data.validation):
        if isinstance(one, str) or one.on_bad_row is None:
            continue
        if not config.trains_on_files:
            yield Problem(
                ("data.train",), f"{one.path} has on_bad_row, which is of conversations and pairs: leave it out"
            )
        elif one.stream_rows is not None:
            problem = f"{one.path} has on_bad_row, by which rows are read and counted at the start, and stream_rows"
            yield Problem(("data.train",), f"{problem}: leave one out")
    if config.data.stream_rows is not None and config.teachers.hint is not None:
        problem = "data.train has stream_rows, and teacher.hint is read with all prompts at the start: leave one out"
        yield Problem(("data.train", "teacher.hint"), problem)
    if config.trains_on_files and any(weights.values()):
        yield Problem.of(
            f"^data.train has weights, and ^recipe={config.recipe} takes every example once an epoch: leave them out"
        )
    if any(weight_of(one) is not None for one in config.data.validation):
        yield Problem.of("^data.validation has weights, and every prompt of it is sampled once: leave them out")


def _reward(config: RunConfig) -> Iterator[Problem]:
    if "rollout" not in config.roles:
        return
    yield from (Problem(("reward.functions", "reward.models"), problem) for problem in config.reward.problems())
    is_needed = config.needs_rewards and config.rollout.own_episode is None  # which may return rewards
    if is_needed and not config.is_rewarded:
        yield Problem.of(
            "^reward.function: required, but not set; expected `file.py:compute_score`, or several in "
            "reward.functions, or ^reward.path=FOLDER for a reward model; `reasoning_gym` scores what its generators "
            "make",
            is_missing=True,
        )
    if config.reward.function == "digits" and config.data.generate is None:
        yield Problem.of(
            "^reward.function='digits' scores the digit tasks of ^data.generate, which is off; expected "
            "file.py:function"
        )


def _batch(config: RunConfig) -> Iterator[Problem]:
    rollout, num_units, keys = config.rollout, config.num_rows, ("rollout.num_prompts", "rollout.group_size")
    of_step = f"rows of a step (rollout.num_prompts={rollout.num_prompts} x rollout.group_size={rollout.group_size})"
    if config.trains_on_files:
        num_units, keys, of_step = config.num_examples, ("data.num_examples",), "examples of a step (data.num_examples)"
    for role, learner in config.learners.items():
        if (num_mini_batches := learner.num_mini_batches) > num_units:
            yield Problem(
                (f"{role}.num_mini_batches", *keys),
                f"{role}.num_mini_batches={num_mini_batches} is more than the {num_units} {of_step}",
            )
    cap, together = config.engine.max_tokens_per_micro_batch, config.group_size if config.trains_on_files else 1
    if cap < together * config.max_row_tokens:
        keys, made_of = row_limit(config)
        whole = "one row can have" if together == 1 else "a pair can have, whose rows are computed together"
        yield Problem(
            ("engine.max_tokens_per_micro_batch", *keys),
            f"engine.max_tokens_per_micro_batch={cap} is less than {whole}: expected at least "
            f"{together * config.max_row_tokens} ({made_of if together == 1 else f'{together} x {made_of}'})",
        )


def _created_model(config: RunConfig) -> Iterator[Problem]:
    made = config.model.create
    if made is None:
        return
    if made.hidden_size % 2:
        yield Problem.of(
            f"^model.create.hidden_size={made.hidden_size} is odd, and heads of an even width must fill it; expected "
            f"{made.hidden_size - 1} or {made.hidden_size + 1}"
        )
    elif made.hidden_size % made.num_heads or (made.hidden_size // made.num_heads) % 2:
        fits = [n for n in range(1, 65) if made.hidden_size % n == 0 and (made.hidden_size // n) % 2 == 0]
        yield Problem.of(
            f"^model.create.num_heads={made.num_heads} does not divide ^model.create.hidden_size={made.hidden_size} "
            f"into heads of an even width; expected one of {', '.join(map(str, fits))}"
        )
    heads, has_latents = made.num_heads, FAMILIES[made.architecture].has_latents
    fits = [n for n in range(heads if has_latents else 1, heads + 1) if heads % n == 0]
    if made.num_key_value_heads not in fits:
        what = "is not, where every head has its own," if has_latents else "does not divide"
        said = f"model.create.num_key_value_heads={made.num_key_value_heads} {what} model.create.num_heads={heads}"
        where = ("model.create.num_key_value_heads", "model.create.num_heads")
        yield Problem(where, f"{said}; expected one of {', '.join(map(str, fits))}")


def _tokenizer(config: RunConfig) -> Iterator[Problem]:
    if config.model.tokenizer is not None and config.model.create is not None:
        yield Problem.of(
            "^model.tokenizer changes the tokenizer of a model's folder, and ^model.create makes its own; expected null"
        )
    if config.data.template and config.model.create is not None:
        yield Problem.of(
            f"^data.template={shown(config.data.template)} has no effect with ^model.create, whose chat template reads "
            "no argument: leave it out, or name a model with model.path"
        )


def _lora(config: RunConfig) -> Iterator[Problem]:
    lora = config.model.lora
    if lora is None:
        return
    if not lora.target_modules and not lora.target_parameters:
        yield Problem.of(
            "^model.lora.target_modules is empty, so nothing would be trained; expected all-linear, or names such as "
            "[q_proj, v_proj]"
        )
    shape, targets = shape_of(config), known_adapter(lora).target_parameters
    if shape is not None and (unknown := [repr(one) for one in targets if not shape.has_experts(one)]):
        key, value = ("path", lora.path) if lora.path else ("target_parameters", targets)
        have = f"no {', '.join(unknown)}; expected {' or '.join(shape.expert_matrices)}"
        if not shape.expert_matrices:
            have = (
                f"no experts that are known; those of type {', '.join(MIXTURES)} have. Linear layers are target_modules"
            )
        yield Problem.of(f"^model.lora.{key}={shown(value)}: models of type {shape.model_type!r} have {have}")
    if lora.path is None:
        return
    for name, info in LoRAConfig.model_fields.items():
        value = getattr(lora, name)
        if name != "path" and value != info.default:
            yield Problem.of(
                f"^model.lora.{name}={shown(value)} contradicts ^model.lora.path={lora.path!r}, where "
                "adapter_config.json says it already; leave one of them out"
            )


def _sampling(config: RunConfig) -> Iterator[Problem]:
    """Yield what does not fit together in the section `rollout`."""
    rollout = config.rollout
    if rollout.min_response_tokens > rollout.max_response_tokens:
        yield Problem.of(
            f"^rollout.min_response_tokens={rollout.min_response_tokens} is more than "
            f"^rollout.max_response_tokens={rollout.max_response_tokens}; expected at most that"
        )
    if "" in rollout.stop:
        yield Problem.of(
            f"^rollout.stop={list(rollout.stop)} has an empty text, which every response begins with; leave it out"
        )
    if rollout.top_k == 1 and rollout.group_size > 1:
        yield Problem.of(
            f"^rollout.top_k=1 makes the {rollout.group_size} rollouts of a prompt (^rollout.group_size) the same; "
            "expected at least 2, or null"
        )
    if config.validation.temperature == 0 and config.validation.num_samples > 1:
        yield Problem.of(
            f"^validation.num_samples={config.validation.num_samples}: with ^validation.temperature=0 all of them are "
            "the same; set a temperature such as 0.6, or num_samples=1"
        )
    if 0 < config.validation.temperature < MIN_TEMPERATURE:
        yield Problem.of(
            f"^validation.temperature={config.validation.temperature:g}: expected 0 (greedy) or at least "
            f"{MIN_TEMPERATURE:g}; logits are divided by it"
        )
    if rollout.weights != "auto":
        yield from way_of_weights(config, TRANSPORT_KINDS[rollout.weights])
    if rollout.max_batch_rows < rollout.group_size:
        yield Problem.of(
            f"^rollout.max_batch_rows={rollout.max_batch_rows} is less than one group: expected at least "
            f"^rollout.group_size={rollout.group_size}"
        )
    if rollout.cache_tokens is not None:
        yield from _cache(config, rollout.cache_tokens)
    if rollout.engine == "vllm":
        yield from vllm_problems(config)


def _shaping(config: RunConfig) -> Iterator[Problem]:
    """Yield what does not fit together in what is done to scores and rows before they train."""
    rollout, (max_tokens, buffer_tokens) = config.rollout, config.overlong
    if max_tokens > rollout.max_response_tokens:
        yield Problem.of(
            f"^reward.overlong.max_tokens={max_tokens} is never reached: no response is longer than "
            f"^rollout.max_response_tokens={rollout.max_response_tokens}; expected at most that, or null"
        )
    if buffer_tokens > max_tokens:
        yield Problem.of(
            f"^reward.overlong.buffer_tokens={buffer_tokens} begins before the response does: the penalty is whole at "
            f"{max_tokens} tokens (^reward.overlong.max_tokens, or ^rollout.max_response_tokens); expected at most "
            f"{max_tokens}, usually a fifth of it, or null"
        )
    if rollout.dynamic_sampling == 0 and rollout.group_size == 1:
        yield Problem.of(
            "^rollout.dynamic_sampling=0 with ^rollout.group_size=1 masks everything: the scores of a group of one "
            "are all equal; expected null, or groups of at least 2, usually 8"
        )
    if config.num_frozen_steps >= config.trainer.num_steps:
        yield Problem.of(
            f"^critic.warmup_steps={config.num_frozen_steps} of ^trainer.num_steps={config.trainer.num_steps}: the "
            f"actor would never learn; expected less than {config.trainer.num_steps}"
        )


def _cache(config: RunConfig, cache_tokens: int) -> Iterator[Problem]:
    """Yield the problem if the size of the KV cache has no effect, or is too small."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    # A prompt and its response begin a block each; one more keeps the longest prompt below the longest row.
    least = (1 + sum(-(-longest // BLOCK_TOKENS) for longest in (prompt, response))) * BLOCK_TOKENS
    if config.rollout.engine == "hf":
        yield Problem.of(
            f"^rollout.cache_tokens={cache_tokens} has no effect: ^rollout.engine='hf' has no such cache; leave it out"
        )
    elif config.rollout.engine == "native" and cache_tokens < least:
        yield Problem.of(
            f"^rollout.cache_tokens={cache_tokens} cannot hold one row of ^data.max_prompt_tokens={prompt} + "
            f"^rollout.max_response_tokens={response}, which lie in blocks of {BLOCK_TOKENS}; expected at least {least}"
        )


def vllm_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what a run with rollout.engine=vllm cannot have."""
    if config.rollout.on_load == "keep":
        yield Problem.of(
            "^rollout.on_load='keep' is for our own engine: with ^rollout.engine=vllm what responses under way have "
            "of keys and values is computed again under new weights; leave it at recompute"
        )
    if config.rollout.schedule is not None:
        yield Problem.of(
            "^rollout.schedule is for engines in our processes, whose steps can be repeated one by one; with "
            "^rollout.engine=vllm use none"
        )
    if config.rollout.exact:
        yield Problem.of(
            "^rollout.exact=true is for our own engine: with ^rollout.engine=vllm the last bits of logits depend on "
            "what else is in the batch; use rollout.engine=native"
        )
    lora = config.model.lora and known_adapter(config.model.lora)
    if lora is not None and lora.rank > MOST_VLLM_RANK:
        yield Problem.of(
            f"^model.lora.rank={lora.rank} is more than ^rollout.engine='vllm' has room for; expected at most "
            f"{MOST_VLLM_RANK}, or rollout.engine=native"
        )
    if lora is not None and lora.target_parameters:
        yield Problem(
            ("model.lora.path" if lora.path else "model.lora.target_parameters", "rollout.engine"),
            f"rollout.engine='vllm' takes adapters of linear layers only, and these have experts "
            f"(target_parameters={shown(lora.target_parameters)}); use rollout.engine=native"
            + ("" if lora.path else ", or model.lora.target_parameters=[]"),
        )
    if lora is not None and config.rollout.weights not in ("auto", FOLDER.name):
        yield Problem.of(
            f"^rollout.weights={config.rollout.weights!r}: with ^rollout.engine=vllm adapters take the way "
            f"`{FOLDER.name}`; leave it at auto"
        )
    shape = shape_of(config)
    if shape is not None and config.cluster.device == "cpu" and shape.model_type in MIXTURES:
        yield Problem.of(
            f"^rollout.engine='vllm' with ^cluster.device=cpu: experts of models of type {shape.model_type!r} are "
            "others in vLLM 0.32 on processors than were published to it; use rollout.engine=native"
        )
    if shape is not None and config.cluster.device == "cpu" and (unknown := shape.head_dims - set(_CPU_HEAD_DIMS)):
        made, fits = config.model.create, ", ".join(map(str, _CPU_HEAD_DIMS))
        remedy = "use rollout.engine=native"
        if made is not None and (num_heads := made.hidden_size // 32) and made.hidden_size % 32 == 0:
            remedy += f", or model.create.num_heads={num_heads} model.create.num_key_value_heads={num_heads}"
        yield Problem(
            ("rollout.engine", "cluster.device", "model.create.num_heads"),
            f"rollout.engine='vllm' with cluster.device=cpu: the model's heads are {max(unknown)} wide, and vLLM on "
            f"processors knows {fits} only; {remedy}",
        )
