"""verl's names for metrics that we also have, for dashboards that were made for it.

Owns: which of its names means the same. Must not know: where metrics go. What means something else keeps our name;
docs/tracking.md says where the two differ.

>>> as_in_verl({"actor/policy_loss": 0.5, "rollout/idle": 0.25})
{'actor/pg_loss': 0.5, 'rollout/idle': 0.25}
>>> as_in_verl({"reward/mean": 0.5})
{'critic/score/mean': 0.5, 'critic/rewards/mean': 0.5}
>>> as_in_verl({"reward/mean": 0.5, "reward/kept_mean": 0.25})
{'reward/mean': 0.5, 'critic/score/mean': 0.25, 'critic/rewards/mean': 0.25}
>>> for name in as_in_verl({f"validation/{name}/gsm8k": 0.5 for name in ("mean@8", "pass@1", "pass@4", "pass@8")}):
...     print(name)
val-core/gsm8k/reward/mean@8
val-core/gsm8k/acc/mean@8
val-aux/gsm8k/acc/best@4/mean
val-core/gsm8k/acc/best@8/mean
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

VERL_NAMES = {
    "actor/policy_loss": "actor/pg_loss",
    "actor/clip_fraction": "actor/pg_clipfrac",
    "actor/approx_kl": "actor/ppo_kl",
    "actor/reference_kl": "actor/kl_loss",
    "kl/reference_mean": "actor/reward_kl_penalty",
    "kl/coef": "actor/reward_kl_penalty_coeff",
    "actor/correction": "rollout_corr/rollout_is_mean",
    "data/epoch": "training/epoch",
    "critic/loss": "critic/vf_loss",
    "critic/clip_fraction": "critic/vf_clipfrac",
    "critic/value": "critic/vpred_mean",
    "critic/return": "critic/returns/mean",
    "critic/explained_variance": "critic/vf_explained_var",
    "reward/kept_mean": "critic/score/mean",
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
_OF_VALIDATION = {"mean": "reward/mean@{k}", "best": "reward/best@{k}/mean", "majority": "reward/maj@{k}/mean"}
_KEPT, _REWARD = "reward/kept_mean", "reward/mean"


def as_in_verl(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a line by verl's names; one that verl does not have keeps its name.

    The mean score of the groups that were trained on has two names there, before and after what is added to scores,
    where nothing is added to them. It is `reward/mean` if no group was replaced.
    """
    if _REWARD in scalars and _KEPT not in scalars:
        scalars = {_KEPT if name == _REWARD else name: value for name, value in scalars.items()}
    sizes = {source: k for kind, k, source in _validations(scalars) if kind == "mean"}
    found = {_in_verl(name, sizes): value for name, value in scalars.items()}
    is_penalised = "kl/reference_mean" in scalars and "actor/reference_kl" not in scalars
    if _KEPT in scalars and not is_penalised and "reward/overlong_penalty" not in scalars:
        found["critic/rewards/mean"] = scalars[_KEPT]
    return found


def _validations(names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yield kind, k and source of each metric of a validation."""
    for name in names:
        if found := re.fullmatch(r"validation/(mean|best|majority|pass)@(\d+)/(.+)", name):
            yield found[1], int(found[2]), found[3]


def _in_verl(name: str, sizes: Mapping[str, int]) -> str:
    """Return the name of one; `sizes` has the number of responses to a prompt, by source."""
    for kind, k, source in _validations([name]):
        size = sizes.get(source, k)
        if kind == "pass":
            what, is_core = (f"acc/mean@{size}", True) if k == 1 else (f"acc/best@{k}/mean", k == size)
        else:
            what, is_core = _OF_VALIDATION[kind].format(k=k), k == size
        return f"val-{'core' if is_core else 'aux'}/{source}/{what}"
    return VERL_NAMES.get(name, name)
