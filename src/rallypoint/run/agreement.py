"""The gap between the logprobs of sampler and trainer: its mean, its maximum, and the token that has the maximum.

Owns: the names of these metrics, and their wording. Must not know: tensors, tokenizers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Self

from rallypoint.journal import STEP
from rallypoint.observability.numbers import number

GAP_MEAN, GAP_MAX = "rollout/logprob_gap_mean", "rollout/logprob_gap_max"
DRIFT = "rollout/drift/"
"""Prefix of the drift metrics; the number of training steps follows."""
WORST_PROMPT, WORST_SAMPLE = "rollout/worst_prompt", "rollout/worst_sample"
WORST_PLACE, WORST_TOKEN = "rollout/worst_place", "rollout/worst_token"
WORST_ROLLOUT, WORST_OLD = "rollout/worst_rollout_logprob", "rollout/worst_old_logprob"
_NUM_TOKENS = "rollout/num_tokens"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The gap |rollout_logprobs - old_logprobs| over some steps.

    >>> step = {"step": 4, "rollout/num_tokens": 100, GAP_MEAN: 2e-7, GAP_MAX: 3e-6}
    >>> step |= {WORST_PROMPT: 17, WORST_SAMPLE: 2, WORST_PLACE: 9, WORST_TOKEN: 12}
    >>> print(Agreement.of([step], lambda token: "7"))
    mean 2e-07, largest 3e-06 nats: token 9 of prompt 17 sample 2, '7' (id 12), step 4
    """

    mean: float
    """Nats a token."""
    largest: float
    """Nats."""
    step: int
    """Step of the largest gap; the fields below describe its token."""
    prompt: int
    """Index of the prompt in the run."""
    sample: int
    place: int
    """Position of the token in its row, prompt included, from 0."""
    token: int
    """Its id."""
    text: str | None
    """Text of the token; None if it is not known."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, float]], text_of: Callable[[int], str] | None = None) -> Self | None:
        """Sum up lines of metrics.jsonl; None if none of them has a gap."""
        steps = [record for record in records if WORST_TOKEN in record]
        if not steps:
            return None
        # NaN is worse than any gap.
        worst = max(steps, key=lambda record: math.inf if math.isnan(record[GAP_MAX]) else record[GAP_MAX])
        num_tokens = sum(record[_NUM_TOKENS] for record in steps)
        token = int(worst[WORST_TOKEN])
        return cls(
            mean=sum(record[GAP_MEAN] * record[_NUM_TOKENS] for record in steps) / max(1, num_tokens),
            largest=worst[GAP_MAX],
            step=int(worst[STEP]),
            prompt=int(worst[WORST_PROMPT]),
            sample=int(worst[WORST_SAMPLE]),
            place=int(worst[WORST_PLACE]),
            token=token,
            text=None if text_of is None else text_of(token),
        )

    @property
    def gaps(self) -> str:
        """The two gaps in words."""
        return f"mean {number(self.mean)}, largest {number(self.largest)} nats"

    @property
    def worst(self) -> str:
        """The place of the largest gap."""
        text = "" if self.text is None else f"{self.text!r} "
        where = f"token {self.place} of prompt {self.prompt} sample {self.sample}"
        return f"{where}, {text}(id {self.token}), step {self.step}"

    def __str__(self) -> str:
        return f"{self.gaps}: {self.worst}"
