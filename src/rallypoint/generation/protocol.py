"""What every engine understands: requests in, outputs out, weights by version.

Owns: the words that an engine and its callers share. Must not know: models, caches, or what a rollout is for.

Consumes: requests, at any time and from any thread. Produces: outputs, in the order of the tokens of each request.
Waits for: nothing; `step` does what can be done now and returns. Unblocked by: `submit`, and `load` after a `sleep`.

Invariant: the tokens of a request follow from (logits, its params, prompt and sample index) and from nothing else: not
from the other requests of the batch, their order, a preemption, or the engine. Logits follow from the weights and the
tokens so far, up to rounding, which may depend on the batch (see `native/engine.py`).

A request whose response is 7 8 <eos>, in two outputs:

    Output(request_id=3, tokens=(7,), logprobs=(-1.2,), sampled_logprobs=(-0.9,), version=4)
    Output(request_id=3, tokens=(8, 0), logprobs=(-0.3, -0.1), sampled_logprobs=(-0.2, -0.1), version=5,
          finish_reason="stop")
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias

from torch import Tensor

from rallypoint.config.limits import MAX_TOP_K, MIN_TEMPERATURE
from rallypoint.errors import RallyError

if TYPE_CHECKING:
    from rallypoint.config import RolloutConfig

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "failed"]
"""A stop token or string came; a limit was reached; `cancel` was called; see `Output.error`."""

PromptLogprobs: TypeAlias = "tuple[Mapping[int, float], ...]"
"""What a model says of each token of a prompt but the first, by id, at temperature 1: the logprobs of the likeliest
tokens in its place, the likeliest first, and then of the token itself if it is none of them."""

_INF = float("inf")
_WARM = f"at least {MIN_TEMPERATURE:g}"
_INT64 = (-(2**63), 2**63 - 1)
"""The least and the largest integer that a tensor can hold."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How rollouts are drawn.

    The order of what narrows the distribution is that of transformers: repetition penalty, minimum length,
    temperature, top-k, top-p, min-p.
    """

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    """A rollout ends with the first of these, which belongs to it."""
    min_new_tokens: int = 0
    """Stop tokens are not drawn before, and stop strings not looked for."""
    stop_strings: tuple[str, ...] = ()
    """A rollout ends with the token that completes one of these."""
    top_k: int | None = None
    """Only the k likeliest tokens are drawn."""
    top_p: float = 1.0
    """Only the fewest likeliest tokens that together have at least this probability are drawn."""
    min_p: float = 0.0
    """Only tokens with at least this part of the likeliest one's probability are drawn."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the response has are divided by it, or multiplied where negative."""
    policy_temperature: float | None = None
    """The temperature at which training recomputes `Output.logprobs`; None: that of the draw (for 0: 1)."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "seed", "top_k"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        object.__setattr__(self, "stop_tokens", _plain_ids(self.stop_tokens))
        longest, least, size = self.max_new_tokens, self.min_new_tokens, "a whole number of at least 1"
        most = longest if is_whole(longest) else _INT64[1]
        k, p, penalty, heat = self.top_k, self.top_p, self.repetition_penalty, self.temperature
        ids = f"a whole number from 1 to {MAX_TOP_K}"
        trained = self.policy_temperature
        is_several = all(self.stop_strings) and not isinstance(self.stop_strings, str)
        refuse_unless(
            ("max_new_tokens", longest, is_whole(longest, 1), size),
            ("min_new_tokens", least, is_whole(least, 0, most), f"0 to max_new_tokens={longest}"),
            ("seed", self.seed, is_whole(self.seed), "a whole number of at most 64 bits, with its sign"),
            ("temperature", heat, heat == 0 or _is_warm(heat), f"0 (greedy) or {_WARM}"),
            ("policy_temperature", trained, trained is None or _is_warm(trained), f"None, or {_WARM}"),
            ("top_k", k, k is None or is_whole(k, 1, MAX_TOP_K), f"{ids}, or None for all tokens"),
            ("top_p", p, 0 < p <= 1, "more than 0 and at most 1 (all tokens)"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 (all tokens) to 1"),
            ("repetition_penalty", penalty, 0 < penalty < _INF, "more than 0; 1 is none"),
            ("stop_strings", self.stop_strings, is_several, "several strings in a tuple, and no empty string"),
        )

    @classmethod
    def of(cls, rollout: RolloutConfig, *, seed: int, stop_tokens: tuple[int, ...]) -> Self:
        """Return how a config has rollouts drawn."""
        return cls(
            max_new_tokens=rollout.max_response_tokens,
            min_new_tokens=rollout.min_response_tokens,
            temperature=rollout.temperature,
            seed=seed,
            stop_tokens=stop_tokens,
            stop_strings=rollout.stop,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
        )

    @property
    def has_own_temperature(self) -> bool:
        """Whether `Output.logprobs` are at another temperature than the draw."""
        return self.policy_temperature not in (None, self.temperature or 1.0)

    @property
    def narrows(self) -> bool:
        """Whether tokens are drawn from another distribution than the model's own at the policy's temperature."""
        return (
            self.temperature == 0
            or self.has_own_temperature
            or self.top_k is not None
            or self.top_p < 1
            or self.min_p > 0
            or self.repetition_penalty != 1
            or (self.min_new_tokens > 0 and bool(self.stop_tokens))
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one response."""

    tokens: tuple[int, ...]
    """The prompt. Requests with the same beginning share its computation."""
    params: SamplingParams
    prompt_index: int = 0
    """With `sample_index` and the seed it decides the random numbers."""
    sample_index: int = 0
    streamed: bool = False
    """Whether outputs come token by token; otherwise one at the end, or one for each version of the weights."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens in `Output.prompt_logprobs`; None: there is nothing of the prompt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _plain_ids(self.tokens))
        for name in ("prompt_index", "sample_index"):
            value = _plain(getattr(self, name))
            object.__setattr__(self, name, value)
            if not is_whole(value):
                raise ValueError(f"{name}={value!r}: expected a whole number of at most 64 bits, with its sign")
        if (asked := self.prompt_logprobs) is not None:
            refuse_unless(("prompt_logprobs", asked, is_whole(asked, 0), "None or a whole number from 0"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Some consecutive tokens of a response, all sampled from weights of one version."""

    request_id: int
    tokens: tuple[int, ...]
    """May be empty when the request ends without another token."""
    logprobs: tuple[float, ...]
    """Log-probabilities by the model as trained: its whole distribution at the temperature (for temperature 0: at 1),
    or at `SamplingParams.policy_temperature`, which training recomputes. `RolloutBatch.rollout_logprobs` holds them."""
    sampled_logprobs: tuple[float, ...]
    """Log-probabilities by the distribution that was drawn from: at the temperature of the draw, after penalty, minimum
    length, top-k, top-p and min-p; 0 if greedy."""
    version: int
    experts: bytes = b""
    """Experts of the pass that sampled each token, end to end, see `PolicySequences.experts`; empty if not recorded."""
    prompt_experts: bytes = b""
    """Experts of the pass that predicted each token of the prompt, in the last output."""
    finish_reason: FinishReason | None = None
    """None: more will come."""
    error: RallyError | None = None
    """Why it failed, exactly when `finish_reason` is failed."""
    prompt_logprobs: PromptLogprobs | None = None
    """In the last output of a request that asked for them and did not fail."""

    @classmethod
    def failed(cls, number: int, version: int, error: RallyError) -> Output:
        """Return the last output of a request that has failed."""
        return cls(
            request_id=number,
            tokens=(),
            logprobs=(),
            sampled_logprobs=(),
            version=version,
            finish_reason="failed",
            error=error,
        )

    def without(self, num: int) -> Output:
        """Return it without its first tokens."""
        return dataclasses.replace(
            self,
            experts=self.experts[num * (len(self.experts) // max(1, len(self.tokens))) :],
            tokens=self.tokens[num:],
            logprobs=self.logprobs[num:],
            sampled_logprobs=self.sampled_logprobs[num:],
        )


class RequestSampler(Protocol):
    """Samples for others: the mailbox of a run for the clients of episodes, or one engine that stands for it."""

    async def sample(
        self, request: Request, rank: int | None = None, deliver: Callable[[Output], None] | None = None
    ) -> list[Output]:
        """Return the outputs of a request, on a rank or any; `deliver` gets each as it comes."""
        ...


class GenerationEngine(Protocol):
    """Continues token ids. All methods but `submit` and `cancel` are for one thread."""

    @property
    def version(self) -> int:
        """Version of the loaded weights, see `Learner.version`."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """The longest prompt and response together: what the model's positions and the cache's memory allow."""
        ...

    def submit(self, request: Request) -> int:
        """Queue a request and return its id; those submitted first are admitted first.

        Raises:
            RequestError: the prompt is empty, too long, or has ids that the model does not know; or the engine samples
                only, and prompt logprobs are asked for.
        """
        ...

    def cancel(self, request_id: int) -> None:
        """Cancel a request: its next output is its last. Does nothing if it has ended or does not exist."""
        ...

    def step(self) -> list[Output]:
        """Advance the running requests, usually by one token each, and return what is new.

        Returns at once when there is no request. While the engine sleeps nothing is sampled; what was cancelled ends.
        """
        ...

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        ...

    @property
    def is_asleep(self) -> bool:
        """Whether nothing is sampled until `wake`."""
        ...

    def load(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        """Load weights; running requests continue with them, and their next tokens have the new version.

        Args:
            version: of the weights.
            weights: by name, all of them; None when they are in place already, as those of a colocated actor are.

        Raises:
            WeightsMismatchError: names, shapes or types are not the model's; nothing has changed then.
        """
        ...

    def sleep(self) -> None:
        """Release all memory except the weights'; running requests wait, and are computed again after `wake`."""
        ...

    def wake(self) -> None:
        """Continue after `sleep`."""
        ...


def _plain(value: object) -> object:
    """Return an integer of another library, such as numpy's, as Python's own; leave everything else as it is."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType] - this is what is found out here
    except TypeError:
        return value


def _plain_ids(ids: object) -> object:
    """Do the same with those of a tuple."""
    if type(ids) is not tuple or set(map(type, ids)) <= {int}:
        return ids
    return tuple(map(_plain, ids))


def is_whole(value: object, least: int = _INT64[0], most: int = _INT64[1]) -> bool:
    """Whether it is an integer within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_warm(temperature: object) -> bool:
    return isinstance(temperature, int | float) and MIN_TEMPERATURE <= temperature < _INF


def refuse_unless(*checks: tuple[str, object, bool, str]) -> None:
    """Refuse values that do not fit.

    Args:
        checks: name, value, whether it fits, and what is expected.

    Raises:
        ValueError: some do not; all of them are named.
    """
    problems = [f"{name}={value!r}: expected {expected}" for name, value, fits, expected in checks if not fits]
    if problems:
        raise ValueError("; ".join(problems))
