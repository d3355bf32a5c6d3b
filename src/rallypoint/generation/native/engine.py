"""The engine: continuous batching over a paged KV cache, on the same modules that are trained.

Owns: requests that come and go, the order of what a step does, outputs, weights and sleep. Must not know: what the
responses are for, how memory is shared out (`Scheduler`), or how tokens go through the model (`ModelRunner`).

A step admits waiting sequences and prefills their prompts, sends the newest token of all others through the model, and
samples one token for each. Small models sample some steps ahead, which new weights undo.

In the mode `fast` the last bits of logits depend on which tokens are computed together, because the rounding of matrix
products depends on their size. So two runs that batch differently may sample different tokens if the random number lies
within 1e-6 (float32) or 1e-2 (bfloat16) of the boundary between two. In the mode `exact` every product has one shape,
and logits are bit-identical whatever else is in the batch.

Ranks over which a model is cut (`models.tensor_parallel`) have an engine each, with the keys and values of their own
heads. They must be given the same requests, cancellations and steps in the same order. Then they schedule alike, and
draw the same tokens, as all have the same logits (see decision 0041).
"""

from __future__ import annotations

import math
import threading
from collections import abc
from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.errors import ModelError, RequestError
from rallypoint.generation.native.accelerator.backend import AcceleratorBackend
from rallypoint.generation.native.block_manager import BlockManager
from rallypoint.generation.native.cpu.backend import CPUBackend, ExactBackend
from rallypoint.generation.native.kv_cache import CacheSize
from rallypoint.generation.native.model_runner import Backend, ModelRunner, SampledStep
from rallypoint.generation.native.recording_decoder import RecordingDecoder
from rallypoint.generation.native.recurrent import is_recurrent
from rallypoint.generation.native.scheduler import Scheduler
from rallypoint.generation.native.sequence import Sequence
from rallypoint.generation.protocol import Output, Request, is_whole, refuse_unless
from rallypoint.generation.requests import Decode, check_request, max_positions, not_finite, take_over, vocabulary_size
from rallypoint.models.tensor_parallel import peers_of
from rallypoint.parallel import least_of

_LEAST_CACHE_TOKENS = 2 * BLOCK_TOKENS
"""A prompt and its response begin a block each."""


class NativeEngine:
    """See `GenerationEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int = 256,
        cache_tokens: int | CacheSize = 65_536,
        mode: Literal["fast", "exact"] = "fast",
        on_load: Literal["keep", "recompute"] = "keep",
        decode: Decode | None = None,
        version: int = 0,
        keeps_memory: bool = False,
        backend: Backend | None = None,
        records_experts: bool = False,
    ) -> None:
        """Sample from a model that `load_policy` made.

        Args:
            model: its weights are used where they are, and never copied.
            max_rows: sequences that run together.
            cache_tokens: tokens whose keys and values there is memory for; a `CacheSize` if free memory decides.
            mode: see the module.
            on_load: whether sequences that run keep their old keys and values under new weights.
            decode: turns token ids into text, for stop strings.
            version: of the model's weights.
            keeps_memory: whether the cache and captured graphs stay while the engine sleeps.
            backend: how the model runs; None: as the model's device and the mode want it.
            records_experts: whether outputs have the experts that tokens of a mixture were sent to.

        Raises:
            ValueError: one of these is out of its range.
        """
        size = CacheSize.of(cache_tokens)
        least = f"a whole number of at least {_LEAST_CACHE_TOKENS}, a block each for a prompt and its response"
        refuse_unless(
            ("max_rows", max_rows, is_whole(max_rows, 1), "a whole number of at least 1"),
            ("cache_tokens", size.least_tokens, is_whole(size.least_tokens, _LEAST_CACHE_TOKENS), least),
            ("mode", mode, mode in ("fast", "exact"), "'fast' or 'exact'"),
            ("on_load", on_load, on_load in ("keep", "recompute"), "'keep' or 'recompute'"),
        )
        self.model, self.version, self.is_asleep = model, version, False
        self._keeps_memory = bool(least_of(peers_of(model), keeps_memory))  # ranks may have unlike devices
        self._recomputes, self._decode = on_load == "recompute", decode
        self._num_blocks = -(-size.least_tokens // BLOCK_TOKENS)
        self._num_ids, self._max_positions = vocabulary_size(model), max_positions(model)  # slow, and asked by requests
        # A prompt and its response begin a block each.
        self.max_request_tokens = min(self._max_positions, (self._num_blocks - 1) * BLOCK_TOKENS)
        self._scheduler = Scheduler(max_rows)
        backend = backend or _backend_for(model, mode)
        if records_experts:
            backend.decoder = RecordingDecoder(model)
        self._runner = ModelRunner(backend, size, max_rows)
        self._lock = threading.Lock()  # of the next three, which `submit` and `cancel` change from any thread
        self._next_id = 0
        self._arrived: list[Sequence] = []
        self._cancelled: set[int] = set()
        self._late: list[Output] = []
        """Outputs that the next step returns."""

    @property
    def num_preempted(self) -> int:
        """How often a running request was preempted, for an older one or for a sleep."""
        return self._scheduler.num_preempted

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        return bool(self._arrived or self._scheduler.waiting or self._scheduler.running or self._late)

    def submit(self, request: Request) -> int:
        """See `GenerationEngine.submit`."""
        check_request(request, self._num_ids, self.max_request_tokens, self._decode is not None)
        max_new_tokens = min(request.params.max_new_tokens, self._max_positions - len(request.tokens))
        self._check_memory(request, max_new_tokens)
        with self._lock:
            self._next_id += 1
            sequence = Sequence(self._next_id, request, max_new_tokens, self._decode)
            self._arrived.append(sequence)
        return sequence.id

    def cancel(self, request_id: int) -> None:
        """See `GenerationEngine.cancel`."""
        with self._lock:
            self._cancelled.add(request_id)

    @torch.no_grad()
    def step(self) -> list[Output]:
        """See `GenerationEngine.step`. After an error all sequences wait for their turn."""
        outputs = self._receive()
        if self.is_asleep:
            return outputs
        with ExitStack() as on_error:
            on_error.callback(self._start_over, outputs)
            sampled = self._sample()
            on_error.pop_all()
        return outputs + sampled

    def load(self, version: int, weights: abc.Mapping[str, Tensor] | None) -> None:
        """See `GenerationEngine.load`."""
        take_over(self.model, version, weights)
        scheduler = self._scheduler
        begun = (*scheduler.running, *scheduler.waiting)  # those that were preempted, or slept, have tokens too
        self._late += [one.output(self.version) for one in begun if one.num_delivered < len(one.tokens)]
        self.version = version
        if self._recomputes:
            scheduler.preempt(scheduler.running)
        scheduler.end_batches()
        self._runner.end_batches()  # and drop tokens that the old weights have sampled ahead
        scheduler.forget_prompts()

    def sleep(self) -> None:
        """See `GenerationEngine.sleep`."""
        self._scheduler.preempt(self._scheduler.running)
        self._runner.end_batches()
        if self._keeps_memory:
            self._scheduler.forget_prompts()  # as if the engine were new, so that a resumed run has the same bits
        else:
            self._scheduler.blocks = None
            self._runner.release_cache()
        self.is_asleep = True

    def wake(self) -> None:
        """See `GenerationEngine.wake`."""
        self.is_asleep = False

    def _receive(self) -> list[Output]:
        """Queue what was submitted, end what was cancelled, and return outputs that are late."""
        outputs, self._late = self._late, []
        with self._lock:
            self._scheduler.waiting += self._arrived
            self._arrived.clear()
            cancelled, self._cancelled = self._cancelled, set()
        if cancelled:
            outputs += [one.output(self.version, "cancelled") for one in self._scheduler.cancel(cancelled)]
        return outputs

    def _sample(self) -> list[Output]:
        """Sample a token for every running sequence, and end those that are done."""
        scheduler, runner = self._scheduler, self._runner
        if scheduler.blocks is None:
            cache = runner.reserve_cache()
            scheduler.blocks, scheduler.is_recurrent = BlockManager(cache.num_blocks), cache.recurrent is not None
        scheduler.count_waste(runner.num_sampled_ahead, runner.max_waste)
        admitted = self._prefill() if scheduler.num_steps <= 1 else []
        new = [sequence for sequence in admitted if not sequence.tokens]
        if not scheduler.num_steps:
            self._make_batches(1 if new else BLOCK_TOKENS)
            new = [sequence for sequence in new if sequence.is_running]  # one may have been preempted
        sampled: list[tuple[abc.Sequence[Sequence], SampledStep]] = []
        if scheduler.num_steps:
            sampled += runner.decode(scheduler.running, scheduler.num_steps)
            scheduler.num_steps -= 1
        if new:
            sampled += runner.sample_first(new)
        outputs = [output for sequences, tokens in sampled for output in self._append(sequences, tokens)]
        if not scheduler.num_steps:
            runner.end_batches()
        return outputs

    def _prefill(self) -> list[Sequence]:
        """Admit waiting sequences, and compute the keys and values that they lack."""
        admitted, chunks = self._scheduler.admit()
        if chunks:
            self._clear_new_blocks()
            self._runner.prefill(chunks)
        return admitted

    def _make_batches(self, max_steps: int) -> None:
        """Make batches of all sequences that have tokens, for at most so many steps."""
        sequences = self._scheduler.make_batches(max_steps)
        if sequences:
            self._clear_new_blocks()
            self._runner.make_batches(sequences, self._scheduler.tables, self._scheduler.num_steps)

    def _clear_new_blocks(self) -> None:
        assert self._scheduler.blocks is not None, "sequences run"
        assert self._runner.cache is not None, "sequences run"
        self._runner.cache.zero(self._scheduler.blocks.take_new())

    def _append(self, sequences: abc.Sequence[Sequence], step: SampledStep) -> list[Output]:
        """Give sequences their tokens, end those that are done, and return what is new."""
        sampled = step.sampled
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        is_plain = sampled.sampled_logprobs is sampled.logprobs
        sampled_logprobs = logprobs if is_plain else sampled.sampled_logprobs.tolist()
        outputs: list[Output] = []
        ended: list[Sequence] = []
        experts = step.experts or [None] * len(tokens)
        for sequence, token, *both, chose in zip(sequences, tokens, logprobs, sampled_logprobs, experts, strict=True):
            if not sequence.is_running:  # it has ended while its batch goes on
                continue
            if math.isnan(both[0]):
                error = not_finite(sequence.request, len(sequence.tokens))
                outputs.append(sequence.output(self.version, "failed", error))
                ended.append(sequence)
                continue
            reason = sequence.append(token, both[0], both[1], chose)
            if reason is not None:
                ended.append(sequence)
                self._scheduler.note_length(len(sequence.tokens))
            if reason is not None or sequence.request.streamed:
                outputs.append(sequence.output(self.version, reason))
        if ended:
            self._scheduler.end(ended)
        return outputs

    def _start_over(self, outputs: abc.Sequence[Output]) -> None:
        """After an error: send all sequences back to the queue, and forget prompts that may lack keys and values."""
        self._late += outputs
        self._scheduler.preempt(self._scheduler.running)
        self._scheduler.forget_prompts()
        self._runner.end_batches()

    def _check_memory(self, request: Request, max_new_tokens: int) -> None:
        """Refuse a request that would find no memory even alone.

        Raises:
            RequestError: it takes more blocks than there are.
        """
        needed = sum(-(-count // BLOCK_TOKENS) for count in (len(request.tokens), max_new_tokens))
        if needed > self._num_blocks:
            raise RequestError(
                f"prompt {request.prompt_index} has {len(request.tokens)} tokens and its response up to "
                f"{max_new_tokens}, which takes {needed} blocks of {BLOCK_TOKENS} tokens, but the cache has "
                f"{self._num_blocks}; give it more memory, or shorten one of them"
            )


def _backend_for(model: PreTrainedModel, mode: str) -> Backend:
    """Return the backend for a model's device and a mode."""
    if mode == "exact":
        if is_recurrent(model):
            raise ModelError(
                f"{type(model).__name__} has layers of linear attention, whose states are computed token after token: "
                "set rollout.exact=false"
            )
        return ExactBackend(model)
    return CPUBackend(model) if computes_in_pieces(model.device) else AcceleratorBackend(model)
