"""The names that verl gives to metrics that are ours, too, for dashboards that were made for it.

Owns: which of its names means the same. Must not know: where metrics go. What means something else keeps our name;
docs/tracking.md says where the two differ.

>>> [as_in_verl(name) for name in ("actor/policy_loss", "reward/mean", "rollout/idle")]
['actor/pg_loss', 'critic/score/mean', 'rollout/idle']
>>> [as_in_verl(f"validation/{name}/gsm8k") for name in ("mean@8", "pass@4")]
['val-core/gsm8k/reward/mean@8', 'val-core/gsm8k/acc/best@4/mean']
"""

from __future__ import annotations

import re

VERL_NAMES = {
    "actor/policy_loss": "actor/pg_loss",
    "actor/clip_fraction": "actor/pg_clipfrac",
    "actor/approx_kl": "actor/ppo_kl",
    "actor/reference_kl": "actor/kl_loss",
    "kl/reference_mean": "actor/reward_kl_penalty",
    "kl/coef": "actor/reward_kl_penalty_coeff",
    "critic/loss": "critic/vf_loss",
    "critic/clip_fraction": "critic/vf_clipfrac",
    "critic/value": "critic/vpred_mean",
    "critic/return": "critic/returns/mean",
    "critic/explained_variance": "critic/vf_explained_var",
    "reward/mean": "critic/score/mean",
    "rollout/response_length": "response_length/mean",
    "rollout/response_length_max": "response_length/max",
    "rollout/truncated": "response_length/clip_ratio",
    "rollout/gap_kl": "rollout_corr/k3_kl",
    "rollout/gap_chi2": "rollout_corr/chi2_token",
    "actor/memory_gib": "perf/max_memory_allocated_gb",
    "actor/mfu": "perf/mfu/actor",
    "critic/mfu": "perf/mfu/critic",
    "time_s/rollout": "timing_s/gen",
    "time_s/reward": "timing_s/reward",
    "time_s/judge": "timing_s/old_log_prob",
    "time_s/weigh": "timing_s/adv",
    "time_s/learn": "timing_s/update_actor",
    "time_s/publish": "timing_s/update_weights",
    "time_s/validate": "timing_s/testing",
    "time_s/checkpoint": "timing_s/save_checkpoint",
}
"""Our name -> verl's. `actor/entropy` and `grad_norm` and `lr` of actor and critic are the same in both."""
_OF_VALIDATION = {
    "mean": "{source}/reward/mean@{k}",
    "best": "{source}/reward/best@{k}/mean",
    "majority": "{source}/reward/maj@{k}/mean",
    "pass": "{source}/acc/best@{k}/mean",
}


def as_in_verl(name: str) -> str:
    """Return verl's name of a metric, or the name that it has if verl has none."""
    if found := re.fullmatch(r"validation/(mean|best|majority|pass)@(\d+)/(.+)", name):
        return "val-core/" + _OF_VALIDATION[found[1]].format(source=found[3], k=found[2])
    return VERL_NAMES.get(name, name)
