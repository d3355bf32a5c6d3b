"""`model.generate`, one request at a time: slow and plainly right, what the other engines are tested against.

It runs the family's own code with its own cache. Only the choice of the token is ours: a logits processor samples it
with our random numbers, and leaves it as the only one that greedy search can take.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rallypoint.errors import NotFiniteError
from rallypoint.generation.protocol import FinishReason, Output, PromptLogprobs, Request
from rallypoint.generation.requests import (
    Decode,
    StopChecker,
    check_request,
    max_positions,
    not_finite,
    prompt_logprobs,
    take_over,
    vocabulary_size,
)
from rallypoint.generation.sampler import (
    RawLogits,
    SamplingMetadata,
    penalise,
    policy_temperature,
    rollout_keys,
    sample,
    uniform,
)
from rallypoint.models import ATTENTION


class HFEngine:
    """See `GenerationEngine`; every step finishes one request, of a model that `load_policy` made."""

    def __init__(self, model: PreTrainedModel, *, decode: Decode | None = None, version: int = 0) -> None:
        """Sample from a model; `decode` turns token ids into text, for stop strings."""
        self.model = model
        self.version = version
        self.is_asleep = False
        self.max_request_tokens = max_positions(model)
        self._decode = decode
        self._lock = threading.Lock()
        self._waiting: dict[int, Request] = {}
        self._cancelled: set[int] = set()
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        return bool(self._waiting)

    def submit(self, request: Request) -> int:
        """See `GenerationEngine.submit`."""
        check_request(request, vocabulary_size(self.model), self.max_request_tokens, self._decode is not None)
        with self._lock:
            self._next_id += 1
            self._waiting[self._next_id] = request
            return self._next_id

    def cancel(self, request_id: int) -> None:
        """See `GenerationEngine.cancel`."""
        with self._lock:
            self._cancelled.add(request_id)

    def step(self) -> list[Output]:
        """See `GenerationEngine.step`; finish the request that has waited longest."""
        with self._lock:
            gone = [(each, self._waiting.pop(each)) for each in sorted(self._cancelled & self._waiting.keys())]
            self._cancelled.clear()
            oldest = [] if self.is_asleep else [(each, self._waiting.pop(each)) for each in list(self._waiting)[:1]]
        outputs = [self._output(request_id, _TokenSampler(request, None), "cancelled") for request_id, request in gone]
        return outputs + [self._finish(request_id, request) for request_id, request in oldest]

    def load(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        """See `GenerationEngine.load`."""
        take_over(self.model, version, weights)
        self.version = version

    def sleep(self) -> None:
        """See `GenerationEngine.sleep`."""
        self.is_asleep = True

    def wake(self) -> None:
        """See `GenerationEngine.wake`."""
        self.is_asleep = False

    def _finish(self, request_id: int, request: Request) -> Output:
        sampler = _TokenSampler(request, self._decode)
        try:
            return self._output(request_id, sampler, self._continue(request, sampler), said=self._said(request))
        except NotFiniteError as error:
            return self._output(request_id, sampler, "failed", error)

    def _continue(self, request: Request, sampler: _TokenSampler) -> FinishReason:
        own = self.model.generation_config
        # The folder's sampling settings would fill in whatever is left out below.
        self.model.generation_config = GenerationConfig()
        self.model.set_attn_implementation("eager")
        try:
            self.model.generate(  # pyright: ignore[reportCallIssue] - a mixin's method that is not typed
                torch.tensor([request.tokens], device=self.model.device),
                attention_mask=torch.ones(1, len(request.tokens), dtype=torch.int64, device=self.model.device),
                do_sample=False,
                max_new_tokens=min(request.params.max_new_tokens, self.max_request_tokens - len(request.tokens)),
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=[sampler.has_stopped],
            )
        finally:
            self.model.set_attn_implementation(ATTENTION)
            self.model.generation_config = own
        return "stop" if sampler.stopped else "length"

    @torch.no_grad()
    def _said(self, request: Request) -> PromptLogprobs | None:
        if request.prompt_logprobs is None:
            return None
        self.model.set_attn_implementation("eager")
        try:
            logits = self.model(torch.tensor([request.tokens], device=self.model.device)).logits[0]
        finally:
            self.model.set_attn_implementation(ATTENTION)
        num, num_ids = request.prompt_logprobs, logits.shape[1]
        return prompt_logprobs(logits, request.tokens, lambda some: some, num, num_ids=num_ids)

    def _output(
        self,
        request_id: int,
        sampler: _TokenSampler,
        reason: FinishReason,
        error: NotFiniteError | None = None,
        said: PromptLogprobs | None = None,
    ) -> Output:
        return Output(
            request_id=request_id,
            tokens=tuple(sampler.tokens),
            logprobs=tuple(sampler.logprobs),
            sampled_logprobs=tuple(sampler.sampled_logprobs),
            version=self.version,
            finish_reason=reason,
            error=error,
            prompt_logprobs=said,
        )


class _TokenSampler(LogitsProcessor):
    """Samples the tokens of one request, and collects them."""

    def __init__(self, request: Request, decode: Decode | None) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.sampled_logprobs: list[float] = []
        self.stopped = False
        self._request, self._params = request, request.params
        self._metadata = SamplingMetadata.of([request.params], torch.device("cpu"))
        self._stops = StopChecker(request.params, decode)
        self._key = rollout_keys(
            request.params.seed, torch.tensor([request.prompt_index]), torch.tensor([request.sample_index])
        )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return -inf for all tokens but the sampled one."""
        raw = scores.cpu()
        logits, position, params = raw, len(self.tokens), self._params
        if params.repetition_penalty != 1:
            logits = penalise(logits, input_ids.cpu(), torch.tensor([[params.repetition_penalty]]))
        if position < params.min_new_tokens and params.stop_tokens:
            logits = logits.index_fill(1, torch.tensor(params.stop_tokens), float("-inf"))
        before = None
        if logits is not raw or params.has_own_temperature:
            before = RawLogits(torch.tensor([0]), raw, policy_temperature([params], torch.device("cpu")))
        sampled = sample(logits, self._metadata, uniform(self._key, position), before)
        if bool(sampled.logprobs.isnan()):
            raise not_finite(self._request, position)
        token = int(sampled.tokens)
        self.tokens.append(token)
        self.logprobs.append(float(sampled.logprobs))
        self.sampled_logprobs.append(float(sampled.sampled_logprobs))
        self.stopped = self._stops.ends(self.tokens)
        return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([token], device=scores.device), 0.0)

    def has_stopped(self, input_ids: Tensor, scores: Tensor, **options: object) -> Tensor:
        """Return whether the response ends, as a stopping criterion of transformers."""
        del scores, options
        return torch.tensor([self.stopped], device=input_ids.device)
