"""A KL in the loss beside all that weighs tokens, in expectation: aggregation, masks, corrections, old samplers.

The policy is that of `enumerable_policy`, with responses of one token and of two, so that the weight of a token
depends on what is sampled after it; what is minimised is `ActorLoss` itself, with advantages of 0.
"""

import dataclasses
import functools
import itertools
from typing import get_args

import pytest
import torch
from enumerable_policy import EnumerablePolicy

from rallypoint.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    KL,
    OBJECTIVES,
    ActorLoss,
    LossInputs,
    RowMask,
    TokenOutputs,
    weigh,
)
from rallypoint.algorithms.aggregation import AggregationName

POLICY = dataclasses.replace(EnumerablePolicy.random(num_tokens=3, seed=1), stop_token=1)
AT_REFERENCE = dataclasses.replace(POLICY, reference=POLICY.logprobs)
SAMPLER = EnumerablePolicy.random(num_tokens=3, seed=21).logprobs
NEAR = (
    POLICY.logits + 0.3 * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
).log_softmax(-1)

CLIP = OBJECTIVES["clip"](clip_low=0.2, clip_high=0.2, dual_clip=None)
KLS = {
    "k2": KL(coef=1.0, estimator="k2", placement="loss"),
    "k3": KL(coef=1.0, estimator="k3", placement="loss"),
    "abs": KL(coef=1.0, estimator="abs", placement="loss"),
    "k1, corrected": KL(coef=1.0, estimator="k1", placement="loss", importance_corrected=True),
    "k3, corrected": KL(coef=1.0, estimator="k3", placement="loss", importance_corrected=True),
}
DIVERGENCES = {
    "k2": "reverse",
    "k3": "forward",
    "abs": "variation",
    "k1, corrected": "reverse",
    "k3, corrected": "reverse",
}
TIS = {level: CORRECTIONS["tis"](level=level, cap=1e6) for level in ("token", "sequence")}
WEIGHED = {
    "tis": (CLIP, (TIS["token"],)),
    "icepop": (CLIP, (CORRECTIONS["icepop"](low=1e-6, high=1e6),)),
    "tis and a mask of advantages": (CLIP, (TIS["token"], CORRECTIONS["off_policy_mask"](delta=-100.0))),
    "decoupled": (OBJECTIVES["decoupled"](clip_low=0.2, clip_high=0.2, dual_clip=None, max_weight=1e6), ()),
    "decoupled, without a bound": (
        OBJECTIVES["decoupled"](clip_low=0.2, clip_high=0.2, dual_clip=None, max_weight=None),
        (),
    ),
    "dppo": (OBJECTIVES["dppo"](divergence="tv", clip_low=0.2, clip_high=0.2, max_ratio=1e6, anchor="rollout"), ()),
    "cispo": (OBJECTIVES["cispo"](clip_low=1.0, clip_high=1e6, anchor="rollout"), ()),
    "importance_sampling": (OBJECTIVES["importance_sampling"](anchor="rollout"), ()),
}
ANY_CORRECTION = {
    "none": (),
    "tis": (CORRECTIONS["tis"](level="token", cap=1.5),),
    "tis, sequence": (CORRECTIONS["tis"](level="sequence", cap=1.5),),
    "icepop": (CORRECTIONS["icepop"](low=0.5, high=2.0),),
    "mask": (CORRECTIONS["mask"](level="geometric", low=0.7, high=1.5),),
    "kl_mask": (CORRECTIONS["kl_mask"](estimator="k3", max_kl=0.05),),
    "off_policy_mask": (CORRECTIONS["off_policy_mask"](delta=0.0),),
}


def gradient(
    kl,
    *,
    policy=POLICY,
    aggregation="fixed_length",
    mask=RowMask(),  # noqa: B008 - it is frozen
    objective=CLIP,
    corrections=(),
    sampler=None,
    old=None,
    group_size=1,
    at=None,
):
    """Of `ActorLoss` over its denominator, in expectation over groups, or of the group `at`; times 2, `length`."""
    loss = ActorLoss(
        objective=objective,
        corrections=corrections,
        aggregation=aggregation,
        length=2.0,
        entropy_coef=0.0,
        kl=kl,
        is_single_update=False,
    )
    nothing = ADVANTAGES["dr_grpo"](token_discount=None, whiten=False)

    def minimised(logprobs, batch):
        responses = [tuple(row.tolist()) for row in batch.tokens.tensor_split(batch.offsets[1:-1])]
        old_logprobs = policy.stream(policy.logprobs if old is None else old, [row[1:] for row in responses])
        # What is cut off is what ends with the last token of all.
        batch = dataclasses.replace(
            batch,
            old_logprobs=old_logprobs,
            token_rewards=torch.zeros_like(batch.token_rewards),
            truncated=torch.tensor([row[-1] == 2 for row in responses]),
        )
        rows = weigh(batch, nothing, kl=kl, aggregation=aggregation, mask=mask)
        kept = torch.isin(batch.sample_index, rows.sample_index)[batch.row_of_token]
        trained = rows.loss_mask.nonzero().flatten()
        inputs = LossInputs(rows=rows, positions=trained, send=lambda x: x, is_first_step=False)
        seen = logprobs[kept & batch.loss_mask]
        total, _ = loss(TokenOutputs(seen, torch.zeros_like(seen)), inputs)
        return 2.0 * len(responses) * total / max(loss.denominator(rows), 1.0)

    if at is not None:
        return policy.gradient_of(lambda table: minimised(policy.stream(table, at), policy.batch(at, sampler=sampler)))
    return policy.expected_gradient(minimised, group_size=group_size, sampler=sampler)


MASKS = (RowMask(), RowMask(truncated=True))
kls = pytest.mark.parametrize("name", KLS)


@kls
@pytest.mark.parametrize("corrected_by", ANY_CORRECTION)
def test_nothing_is_pulled_where_the_policy_is_the_reference(name, corrected_by):
    """Not by any sample: what is 0 only in the mean of all samples is something else once they are weighed."""
    corrections = ANY_CORRECTION[corrected_by]
    for aggregation, mask in itertools.product(get_args(AggregationName), MASKS):
        run = functools.partial(gradient, KLS[name], policy=AT_REFERENCE, corrections=corrections, sampler=SAMPLER)
        assert float(run(aggregation=aggregation, mask=mask, at=POLICY.responses).abs().max()) < 1e-12


@kls
@pytest.mark.parametrize(
    ("aggregation", "mask"),
    [("sequence", MASKS[0]), ("prompt", MASKS[1]), ("token", MASKS[0]), ("fixed_length", MASKS[1])],
)
def test_whoever_has_sampled_the_gradient_is_that_of_the_policys_own_samples(name, aggregation, mask):
    """Weights of whole rows undo the sampler exactly, whatever else weighs them."""
    run = functools.partial(gradient, KLS[name], aggregation=aggregation, mask=mask)
    torch.testing.assert_close(run(sampler=SAMPLER, corrections=(TIS["sequence"],)), run(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["k1, corrected", "k3, corrected"])
@pytest.mark.parametrize(("aggregation", "mask"), [("sequence", MASKS[1]), ("token", MASKS[0])])
def test_whoever_has_sampled_the_gradient_after_the_policy_has_moved_is_that_of_its_samples(name, aggregation, mask):
    run = functools.partial(gradient, KLS[name], aggregation=aggregation, mask=mask, old=NEAR)
    found = run(sampler=SAMPLER, corrections=(TIS["sequence"],))
    torch.testing.assert_close(found, run(sampler=NEAR), rtol=1e-9, atol=1e-11)


def test_groups_are_weighed_back_as_rows_are():
    """Several rows, whose denominator is one number: the rows of a group."""
    run = functools.partial(gradient, KLS["k3"], aggregation="sequence")
    torch.testing.assert_close(run(group_size=2), run(), rtol=1e-9, atol=1e-11)


@kls
@pytest.mark.parametrize("weighed_by", WEIGHED)
def test_a_stale_sampler_is_weighed_back_token_by_token(name, weighed_by):
    objective, corrections = WEIGHED[weighed_by]
    found = gradient(KLS[name], objective=objective, corrections=corrections, sampler=SAMPLER)
    wanted = POLICY.gradient_of(lambda table: POLICY.token_divergence(table, DIVERGENCES[name], sampler=SAMPLER))
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["k1, corrected", "k3, corrected"])
@pytest.mark.parametrize("level", TIS)
def test_a_corrected_kl_is_right_after_the_policy_has_moved_and_whoever_has_sampled(name, level):
    found = gradient(KLS[name], corrections=(TIS[level],), sampler=SAMPLER, old=NEAR)
    prefixes = SAMPLER if level == "token" else NEAR
    wanted = POLICY.gradient_of(lambda table: POLICY.token_divergence(table, "reverse", sampler=prefixes))
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["k2", "k3", "abs"])
def test_without_a_weight_an_old_sampler_gives_another_gradient(name):
    """Why a config with rollout.max_staleness, a KL in the loss and no weight is refused."""
    found = gradient(KLS[name], sampler=SAMPLER)
    wanted = POLICY.gradient_of(lambda table: POLICY.token_divergence(table, DIVERGENCES[name], sampler=SAMPLER))
    assert float((found - wanted).norm() / wanted.norm()) > 0.1
