"""Advantages, policy losses and corrections: a section for each name, whose keys exist for that name alone.

The classes behind the names are those of `rallypoint.algorithms`, with the same fields; docs/algorithms.md has the
formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, cast

from pydantic import Field, Strict, model_validator

from rallypoint.config.fields import Section, key
from rallypoint.user_code import Value

Anchor = Literal["old", "rollout"]
AggregationName = Literal["token", "sequence", "fixed_length", "prompt"]

USUAL_AGGREGATIONS: dict[str, AggregationName] = {"gspo": "sequence", "gmpo": "sequence", "sapo": "sequence"}
"""Losses whose papers take a mean over rows, with the `aggregation` that they imply unless it is set."""

_FUNCTION = "A function in a file, as file.py:function; see docs/algorithms.md."
_PARAMETERS = "What the function takes by name, such as {floor: 0.1}."
_WHITEN = "Scale the advantages of a step to mean 0 and deviation 1."
_TOKEN_DISCOUNT = "Compare rewards token by token, and discount those after a token by this; null compares their sums."
_CLIP_LOW, _CLIP_HIGH = "The ratio is clipped below 1 - clip_low.", "The ratio is clipped above 1 + clip_high."
_DUAL_CLIP = "Bound of the ratio for negative advantages (arXiv 1912.09729); null for none."
_ANCHOR = "The ratio compares with the policy at the start of the update, or with the sampler."


class GAEConfig(Section):
    """Generalised advantage estimation, with a critic (arXiv 1506.02438)."""

    name: Literal["gae"] = key("gae", help="The estimator.")
    discount: float = key(1.0, at_least=0, at_most=1, help="Discount of later rewards (gamma).")
    gae_lambda: float = key(1.0, at_least=0, at_most=1, help="Between one-step (0) and whole-return (1) estimates.")
    value_lambda: float | None = key(
        None, at_least=0, at_most=1, help="Lambda of the critic's returns (arXiv 2504.05118); null: gae_lambda."
    )
    length_alpha: float | None = key(
        None, above=0, help="Makes lambda 1 - 1 / (length_alpha * length) for the policy; null: gae_lambda."
    )
    unit: Literal["token", "turn"] = key("token", help="What a time step is.")
    whiten: bool = key(True, help=_WHITEN)


class GRPOConfig(Section):
    """Each rollout against those of its prompt (arXiv 2402.03300)."""

    name: Literal["grpo"] = key("grpo", help="The estimator.")
    token_discount: float | None = key(None, at_least=0, at_most=1, help=_TOKEN_DISCOUNT)
    whiten: bool = key(False, help=_WHITEN)


class DrGRPOConfig(Section):
    """GRPO without division by the group's deviation (arXiv 2503.20783)."""

    name: Literal["dr_grpo"] = key("dr_grpo", help="The estimator.")
    token_discount: float | None = key(None, at_least=0, at_most=1, help=_TOKEN_DISCOUNT)
    whiten: bool = key(False, help=_WHITEN)


class TurnGRPOConfig(Section):
    """Each turn against those of the same place in the prompt's other rollouts, by what is earned from there on."""

    name: Literal["turn_grpo"] = key("turn_grpo", help="The estimator.")
    discount: float = key(1.0, at_least=0, at_most=1, help="Discount of later turns' rewards, once a turn.")
    normalize_std: bool = key(True, help="Divide by the deviation, as grpo does; false: as dr_grpo.")
    whiten: bool = key(False, help=_WHITEN)


class GiGPOConfig(Section):
    """Each rollout against those of its prompt, and each turn against those of the same state (arXiv 2505.10978)."""

    name: Literal["gigpo"] = key("gigpo", help="The estimator.")
    discount: float = key(0.95, at_least=0, at_most=1, help="Discount of later turns' rewards, once a turn (gamma).")
    step_weight: float = key(1.0, at_least=0, help="Weight of what turns of the same state are compared by.")
    normalize_std: bool = key(False, help="Divide by the deviations, as grpo does; false: as dr_grpo.")
    whiten: bool = key(False, help=_WHITEN)


class LitePPOConfig(Section):
    """The group's mean and the step's deviation (arXiv 2508.08221)."""

    name: Literal["lite_ppo"] = key("lite_ppo", help="The estimator.")
    whiten: bool = key(False, help=_WHITEN)


class RLOOConfig(Section):
    """The mean of the prompt's other rollouts as baseline (arXiv 2402.14740)."""

    name: Literal["rloo"] = key("rloo", help="The estimator.")
    whiten: bool = key(False, help=_WHITEN)


class ReinforcePlusPlusConfig(Section):
    """Discounted rewards to the row's end, whitened (arXiv 2501.03262)."""

    name: Literal["reinforce_plus_plus"] = key("reinforce_plus_plus", help="The estimator.")
    discount: float = key(1.0, at_least=0, at_most=1, help="Discount of later rewards (gamma).")
    unit: Literal["token", "turn"] = key("token", help="What a time step is.")
    whiten: bool = key(True, help=_WHITEN)


class ReinforcePlusPlusBaselineConfig(Section):
    """The group's mean as baseline, whitened over the step (arXiv 2501.03262)."""

    name: Literal["reinforce_plus_plus_baseline"] = key("reinforce_plus_plus_baseline", help="The estimator.")
    whiten: bool = key(True, help=_WHITEN)


class GDPOConfig(Section):
    """Several rewards, each normalised in its group, then weighed by reward.functions (arXiv 2601.05242)."""

    name: Literal["gdpo"] = key("gdpo", help="The estimator.")
    whiten: bool = key(False, help=_WHITEN)


class MaxRLConfig(Section):
    """Maximum-likelihood RL (arXiv 2602.02710), for rewards of 0 or more."""

    name: Literal["max_rl"] = key("max_rl", help="The estimator.")
    whiten: bool = key(False, help=_WHITEN)


class OPOConfig(Section):
    """Scores weighed by length as baseline (arXiv 2505.23585)."""

    name: Literal["opo"] = key("opo", help="The estimator.")
    whiten: bool = key(False, help=_WHITEN)


class PassAtKConfig(Section):
    """The chance that one of k rollouts is right (arXiv 2508.10751)."""

    name: Literal["pass_at_k"] = key("pass_at_k", help="The estimator.")
    k: int = key(2, at_least=1, help="Rollouts of which one should be right.")
    whiten: bool = key(False, help=_WHITEN)


class OwnAdvantageConfig(Section):
    """A function of your own."""

    name: Literal["own"] = key("own", help="The estimator; own where there is a function.")
    function: str = key(help=_FUNCTION)
    parameters: dict[str, Value] = key({}, help=_PARAMETERS)
    whiten: bool = key(False, help=_WHITEN)


AdvantageConfig = Annotated[
    GAEConfig
    | GRPOConfig
    | DrGRPOConfig
    | TurnGRPOConfig
    | GiGPOConfig
    | LitePPOConfig
    | RLOOConfig
    | ReinforcePlusPlusConfig
    | ReinforcePlusPlusBaselineConfig
    | GDPOConfig
    | MaxRLConfig
    | OPOConfig
    | PassAtKConfig
    | OwnAdvantageConfig,
    Field(discriminator="name"),
]


class ClipConfig(Section):
    """PPO's clipped loss (arXiv 1707.06347)."""

    name: Literal["clip"] = key("clip", help="The policy loss.")
    clip_low: float = key(0.2, above=0, at_most=1, help=_CLIP_LOW)
    clip_high: float = key(0.2, above=0, at_most=10, help=_CLIP_HIGH)
    dual_clip: float | None = key(None, above=1, help=_DUAL_CLIP)


class DecoupledConfig(Section):
    """The clipped loss, weighed back to the sampler (arXiv 2505.24298)."""

    name: Literal["decoupled"] = key("decoupled", help="The policy loss.")
    clip_low: float = key(0.2, above=0, at_most=1, help=_CLIP_LOW)
    clip_high: float = key(0.2, above=0, at_most=10, help=_CLIP_HIGH)
    dual_clip: float | None = key(None, above=1, help=_DUAL_CLIP)
    max_weight: float | None = key(5.0, above=1, help="Cap of that weight; null for none.")


class GSPOConfig(Section):
    """The clipped loss of the ratio's geometric mean over a row (arXiv 2507.18071)."""

    name: Literal["gspo"] = key("gspo", help="The policy loss.")
    clip_low: float = key(3e-4, above=0, at_most=1, help=_CLIP_LOW)
    clip_high: float = key(4e-4, above=0, at_most=10, help=_CLIP_HIGH)
    dual_clip: float | None = key(None, above=1, help=_DUAL_CLIP)


class GMPOConfig(Section):
    """The geometric mean over a row of clipped ratios (arXiv 2507.20673)."""

    name: Literal["gmpo"] = key("gmpo", help="The policy loss.")
    clip_low: float = key(0.4, above=0, at_most=10, help="The log-ratio is clipped below -clip_low.")
    clip_high: float = key(0.4, above=0, at_most=10, help="The log-ratio is clipped above clip_high.")


class CISPOConfig(Section):
    """Clipped weights of the log-probability's gradient (arXiv 2506.13585)."""

    name: Literal["cispo"] = key("cispo", help="The policy loss.")
    clip_low: float = key(1.0, above=0, at_most=1, help="The weight is clipped below 1 - clip_low; 1 is no bound.")
    clip_high: float = key(0.28, above=0, at_most=100, help="The weight is clipped above 1 + clip_high.")
    anchor: Anchor = key("old", help=_ANCHOR)


class SAPOConfig(Section):
    """A gradient that fades as the ratio leaves 1 (arXiv 2511.20347)."""

    name: Literal["sapo"] = key("sapo", help="The policy loss.")
    tau_positive: float = key(1.0, above=0, help="How fast it fades for positive advantages.")
    tau_negative: float = key(1.05, above=0, help="How fast it fades for the others.")


class DPPOConfig(Section):
    """Tokens whose probability has moved too far are left out (arXiv 2602.04879)."""

    name: Literal["dppo"] = key("dppo", help="The policy loss.")
    divergence: Literal["tv", "kl"] = key("tv", help="Total variation or KL of this token against all others.")
    clip_low: float = key(0.2, above=0, at_most=10, help="The most that it may be for negative advantages.")
    clip_high: float = key(0.2, above=0, at_most=10, help="The most that it may be for positive advantages.")
    max_ratio: float = key(20.0, above=1, help="Cap of the ratio.")
    anchor: Anchor = key("rollout", help=_ANCHOR)


class ImportanceSamplingConfig(Section):
    """The ratio times the advantage, without bounds."""

    name: Literal["importance_sampling"] = key("importance_sampling", help="The policy loss.")
    anchor: Anchor = key("old", help=_ANCHOR)


class PolicyGradientConfig(Section):
    """REINFORCE: for one optimizer step a batch."""

    name: Literal["policy_gradient"] = key("policy_gradient", help="The policy loss.")


class ClipCovConfig(Section):
    """The clipped loss without a few tokens of high covariance of logprob and advantage (arXiv 2505.22617)."""

    name: Literal["clip_cov"] = key("clip_cov", help="The policy loss.")
    clip_low: float = key(0.2, above=0, at_most=1, help=_CLIP_LOW)
    clip_high: float = key(0.2, above=0, at_most=10, help=_CLIP_HIGH)
    dual_clip: float | None = key(None, above=1, help=_DUAL_CLIP)
    fraction: float = key(2e-4, above=0, at_most=1, help="Share of a step's tokens that is left out; at least one.")
    covariance_low: float = key(1.0, at_least=0, help="Only tokens of more are left out.")
    covariance_high: float = key(5.0, above=0, help="Only tokens of less are left out.")


class KLCovConfig(Section):
    """Tokens of the highest covariance of logprob and advantage are held to the old policy (arXiv 2505.22617)."""

    name: Literal["kl_cov"] = key("kl_cov", help="The policy loss.")
    fraction: float = key(2e-4, above=0, at_most=1, help="Share of a step's tokens that is held; at least one.")
    coef: float = key(1.0, above=0, help="Coefficient of their KL to the policy at the start of the update.")


class OwnLossConfig(Section):
    """A function of your own."""

    name: Literal["own"] = key("own", help="The policy loss; own where there is a function.")
    function: str = key(help=_FUNCTION)
    parameters: dict[str, Value] = key({}, help=_PARAMETERS)


LossConfig = Annotated[
    ClipConfig
    | DecoupledConfig
    | GSPOConfig
    | GMPOConfig
    | CISPOConfig
    | SAPOConfig
    | DPPOConfig
    | ImportanceSamplingConfig
    | PolicyGradientConfig
    | ClipCovConfig
    | KLCovConfig
    | OwnLossConfig,
    Field(discriminator="name"),
]


class TISConfig(Section):
    """Truncated importance weights."""

    name: Literal["tis"]
    level: Literal["token", "sequence"] = key("token", help="By token, or by whole row.")
    cap: float = key(2.0, above=0, help="The largest weight.")


class IcePopConfig(Section):
    """Importance weights of tokens within bounds, 0 for the others (arXiv 2510.18855)."""

    name: Literal["icepop"]
    low: float = key(0.5, at_least=0, help="The smallest ratio that stays.")
    high: float = key(5.0, above=0, help="The largest ratio that stays.")


class MaskConfig(Section):
    """0 for tokens or rows outside of bounds."""

    name: Literal["mask"]
    level: Literal["token", "product", "geometric"] = key("token", help="By token, or by the row's product or mean.")
    low: float = key(0.5, at_least=0, help="The smallest ratio that stays; of a geometric mean usually 0.999.")
    high: float = key(2.0, above=0, help="The largest ratio that stays; of a geometric mean usually 1.001.")

    @model_validator(mode="before")
    @classmethod
    def _usual_bounds(cls, values: object) -> object:
        """Fill in those of a geometric mean: over a row it hardly leaves 1, and no row would be outside the others."""
        if not isinstance(values, Mapping):
            return values
        given = dict(cast("Mapping[str, object]", values))
        usual = {"low": 0.999, "high": 1.001} if given.get("level") == "geometric" else {}
        return {**usual, **given}


class KLMaskConfig(Section):
    """0 for rows whose sampler and trainer differ too much."""

    name: Literal["kl_mask"]
    estimator: Literal["k2", "k3"] = key("k3", help="Estimator of the KL per token.")
    max_kl: float = key(0.1, above=0, help="The largest mean that stays.")


class OffPolicyMaskConfig(Section):
    """0 for rows of negative advantage that the policy has left (arXiv 2512.02556)."""

    name: Literal["off_policy_mask"]
    delta: float = key(0.5, above=0, help="The largest mean of log(rollout / policy) that stays.")


CorrectionConfig = Annotated[
    TISConfig | IcePopConfig | MaskConfig | KLMaskConfig | OffPolicyMaskConfig, Field(discriminator="name")
]
CorrectionConfigs = Annotated[tuple[CorrectionConfig, ...], Strict(False)]
"""Corrections that multiply."""
