"""What names of TRL mean in recipes other than those with rewards: they go before those of `aliases.py`.

Data only, but for `aliases_for`, which says which recipes have which.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from rallypoint.config.aliases import ALIASES, VALUE, Alias
from rallypoint.config.recipes import RECIPES

OF_FILES: tuple[Alias, ...] = (
    Alias("max_length max_seq_length max_seq_len cutoff_len", (f"data.max_row_tokens={VALUE}",)),
    Alias("batch_size train_batch_size global_batch_size", (f"data.num_examples={VALUE}",)),
    Alias(
        "per_device_train_batch_size gradient_accumulation_steps",
        ("data.num_examples",),
        "examples of a step: those of all devices, times the accumulated ones",
    ),
    Alias("max_prompt_length max_completion_length", ("data.max_row_tokens",), "prompt and answer together"),
    Alias(
        "packing packing_strategy eval_packing padding_free pad_to_multiple_of",
        note="rows are packed without padding, and balanced, always",
    ),
    Alias(
        "assistant_only_loss completion_only_loss train_on_inputs",
        note="the turns of the assistant are trained, and nothing else (docs/finetune.md)",
    ),
    Alias("truncation_mode", ("data.on_too_long",), values=(("keep_start", "data.on_too_long=truncate"),)),
    Alias("dataset_text_field", ("data.columns",), "the columns by our names: messages, or prompt and completion"),
    Alias("disable_dropout", note="models are trained without dropout"),
)
"""Aliases of recipes that train on what is in files."""

OF_PREFERENCES: tuple[Alias, ...] = (
    Alias("beta", (f"preference.beta={VALUE}",)),
    Alias(
        "loss_type dpo_loss",
        ("preference.name",),
        "sigmoid, sigmoid_norm or ipo",
        values=tuple((name, f"preference.name={name}") for name in ("sigmoid", "sigmoid_norm", "ipo")),
    ),
    Alias(
        "precompute_ref_log_probs precompute_ref_batch_size ref_model_name ref_model_path",
        note="the reference is the policy as it begins, computed once before the first step",
    ),
)

OF_TEACHERS: tuple[Alias, ...] = (
    Alias("teacher_model_name_or_path teacher_model teacher_name", (f"teacher.path={VALUE}",)),
    Alias("teacher_model_server_url", (f"teacher.path={VALUE}",)),
    Alias("loss_top_k", (f"teacher.top_k={VALUE}",), values=(("0", "teacher.top_k=null"),)),
    Alias(
        "beta",
        ("teacher.loss",),
        "0 is forward, 1 is reverse; between them there is mixed, the mean of both",
        values=(
            ("0", "teacher.loss=forward"),
            ("0.0", "teacher.loss=forward"),
            ("1", "teacher.loss=reverse"),
            ("1.0", "teacher.loss=reverse"),
        ),
    ),
    Alias("lmbda lambda_", note="the student samples all that it is trained on, as with lmbda=1"),
    Alias("seq_kd", note="the student samples by itself; train on a teacher's answers with recipe=sft"),
)


_AGGREGATIONS = (
    ("token-mean", "aggregation=token"),
    ("seq-mean-token-mean", "aggregation=sequence"),
    ("seq-mean-token-sum-norm", "aggregation=fixed_length"),
    ("grpo", "aggregation=sequence"),
    ("bnpo", "aggregation=token"),
    ("dapo", "aggregation=token"),
    ("dr_grpo", "aggregation=fixed_length"),
    ("cispo", "loss.name=cispo"),
    ("sapo", "loss.name=sapo"),
)
_LOSS_NAMES = (
    ("vanilla", "loss.name=clip"),
    ("ppo", "loss.name=clip"),
    ("gspo", "loss.name=gspo"),
    ("geo_mean", "loss.name=gmpo"),
    ("cispo", "loss.name=cispo"),
    ("sapo", "loss.name=sapo"),
    ("gpg", "loss.name=policy_gradient"),
    ("dppo_tv", "loss.name=dppo"),
    ("dppo_kl", "loss.name=dppo loss.divergence=kl"),
    ("clip_cov", "loss.name=clip_cov"),
    ("kl_cov", "loss.name=kl_cov"),
)

OF_POLICIES: tuple[Alias, ...] = (
    Alias("loss_agg_mode loss_type", ("aggregation",), values=_AGGREGATIONS),
    Alias("loss_mode policy_loss_type", ("loss.name",), values=_LOSS_NAMES),
    Alias("sapo_temperature_pos tau_pos", (f"loss.tau_positive={VALUE}",)),
    Alias("sapo_temperature_neg tau_neg", (f"loss.tau_negative={VALUE}",)),
    Alias("eps_clip_low_high", ("loss.clip_low", "loss.clip_high")),
    Alias(
        "rollout_is rollout_is_threshold vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "enable_vllm_is_correction vllm_is_correction_type vllm_is_truncated_threshold tis_clip use_tis",
        ("correction",),
        "a list, such as [{name: tis, cap: 2}], [{name: icepop, low: 0.5, high: 5}] or "
        "[{name: mask, level: geometric}]",
    ),
    Alias(
        "rollout_rs rollout_rs_threshold",
        ("correction",),
        "a list of masks, such as [{name: mask, level: geometric}] or [{name: kl_mask, max_kl: 0.1}]",
    ),
    Alias("off_policy_mask_threshold opsm_delta use_opsm", ("correction",), "[{name: off_policy_mask, delta: 0.5}]"),
)
"""Aliases of recipes with a policy loss."""


@functools.cache
def aliases_for(recipe: str | None) -> Mapping[str, Alias]:
    """Return the aliases by each of their names, as a recipe has them; None for those that hold anywhere."""
    known = {name: alias for alias in ALIASES for name in alias.names.split()}
    spec = RECIPES.get(recipe or "")
    if spec is None:
        return known
    own = (
        *(OF_FILES if spec.examples != "prompts" else ()),
        *(OF_PREFERENCES if spec.reads("preference") else ()),
        *(OF_TEACHERS if spec.reads("teacher") else ()),
        *(OF_POLICIES if spec.reads("loss") else ()),
    )
    return known | {name: alias for alias in own for name in alias.names.split()}
