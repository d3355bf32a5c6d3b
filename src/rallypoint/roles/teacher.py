"""The models that judge every token of a student's rollouts; each may be larger than the student, none is trained.

A teacher may read what its student does not: a hint after each prompt, made of the example's ground truth, or of what
the reward function says of the student's answer. Then rows have prompts of other tokens, and there is a way back to the
tokens of the student. A prompt (1 2) was answered with 7 8; with a hint it is 1 2 5 6 9:

    tokens     1  2  7  8             said of them         0  0  -1.2  -0.3
    shown      1  2  5  6  9  7  8    said of these        0  0  0  0  0  -1.2  -0.3
"""

from __future__ import annotations

import dataclasses
import re
from asyncio import gather, to_thread
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rallypoint.cluster import WorkerContext, WorkerGroup, shard
from rallypoint.config import RunConfig
from rallypoint.config.sections.learning import ServedTeacherConfig
from rallypoint.data import (
    EncodedPrompts,
    Example,
    Legibility,
    StreamedPrompts,
    encode_legible,
    encode_prompts,
    texts_of,
)
from rallypoint.errors import DataError
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard
from rallypoint.roles.actor import Actor
from rallypoint.roles.colocated import with_lease
from rallypoint.roles.dealing import likeliest_of, logprobs_of, per_token
from rallypoint.roles.frozen import FrozenModel, FrozenWorker
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.served_teacher import ServedTeacher
from rallypoint.types import ActorBatch, DistilledBatch, PerToken, Sequences, offsets_from_lengths


class TeacherWorker(FrozenWorker):
    """One rank of every teacher."""

    role = "teacher"

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        self._temperature, self._top_k = spec.config.temperature, spec.config.teachers.top_k
        super().__init__(context, spec)

    def load(self, context: WorkerContext, spec: WorkerSpec) -> list[ModelShard]:
        """Load this rank's part of every teacher."""
        folders = spec.config.teachers.folders
        with spec.meeting(context) as mesh:
            return [spec.load(load_policy, path, context, mesh, frozen=True) for path in folders]

    @shard
    @with_lease()
    def logprobs(self, parts: list[Sequences], teacher: int) -> list[PerToken]:
        """Return what one of the teachers says of every trained token of some parts of a batch.

        That is its log-probability; with `teacher.top_k` all of `likeliest_tokens`.
        """
        engine, temperature = self.engines[teacher], self._temperature
        if self._top_k is not None:
            return likeliest_of(engine, parts, temperature, self._top_k)
        return logprobs_of(engine, parts, temperature)


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """What teachers say of the trained tokens of a batch."""

    said: Tensor
    """[T] float32: logprob of each, NaN without a teacher; [T, 1 + 2K] with the K likeliest, see `likeliest_tokens`."""
    num_ids: int
    """Number of ids that the tokenizer has: models may have more, which stand for nothing."""

    @property
    def logprobs(self) -> Tensor:
        """[T] logprob of each trained token, NaN without a teacher."""
        return self.said if self.said.dim() == 1 else self.said[:, 0].contiguous()

    def beside(self, batch: ActorBatch) -> DistilledBatch:
        """Return a batch with what was said of it."""
        if self.said.dim() == 1:
            return batch.widen(DistilledBatch, teacher_logprobs=self.said)
        num = self.said.shape[1] // 2
        most, ids = self.said[:, 1 : 1 + num], self.said[:, 1 + num :].nan_to_num().long()
        exists = ids < self.num_ids
        return batch.widen(
            DistilledBatch,
            teacher_logprobs=self.logprobs,
            top_logprobs=most.masked_fill(~exists, -torch.inf),
            top_tokens=ids.masked_fill(~exists, 0),
        )


Split: TypeAlias = Literal["train", "validation"]


@dataclasses.dataclass(frozen=True, slots=True)
class Questions:
    """Prompts that are answered, and what teachers read after them."""

    prompts: EncodedPrompts | StreamedPrompts
    hints: Hints | None

    @classmethod
    def of(
        cls, config: RunConfig, prompts: EncodedPrompts | StreamedPrompts, tokenizer: PreTrainedTokenizerBase
    ) -> Questions:
        """Write the hints of a config.

        Raises:
            DataError: a prompt is too long with its hint.
        """
        if config.teachers.hint is None:
            return cls(prompts, None)
        assert isinstance(prompts, EncodedPrompts), "the config was checked: no stream with hints"
        most = config.data.max_prompt_tokens
        return cls(prompts, Hints.of(config.teachers.hint, prompts, tokenizer, max_prompt_tokens=most))


class Teachers(FrozenModel[TeacherWorker]):
    """The teachers as the driver sees them."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup[TeacherWorker] | None,
        actor: Actor[Any],
        questions: Mapping[Split, Questions],
        num_ids: int,
        served: Sequence[ServedTeacher],
    ) -> None:
        super().__init__(config, group)
        self._actor, self._questions, self._num_ids = actor, questions, num_ids
        self._served = served

    @classmethod
    async def create(
        cls,
        placement: Placement,
        actor: Actor[Any],
        train: EncodedPrompts | StreamedPrompts,
        validation: EncodedPrompts | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Teachers:
        """Start the workers; without a folder the actor is its own teacher, and reads hints.

        Raises:
            DataError: a prompt is too long with its hint.
            TeacherError: a served teacher does not answer.
        """
        config = placement.config
        questions: dict[Split, Questions] = {"train": Questions.of(config, train, tokenizer)}
        if validation is not None and not config.is_rewarded:
            questions["validation"] = Questions.of(config, validation, tokenizer)
        group = await placement.group("teacher", TeacherWorker) if "teacher" in config.roles else None
        served = [
            ServedTeacher.open(url, config.teachers.served or ServedTeacherConfig()) for url in config.teachers.urls
        ]
        return cls(config, group, actor, questions, len(tokenizer), served)

    async def judge(
        self, batch: Sequences, examples: Sequence[int], feedback: Sequence[str], of: Split = "train"
    ) -> Judgement:
        """Return what the teacher of each row says of its trained tokens.

        Args:
            batch: B rows.
            examples: of each, the number of the example that it answers.
            feedback: of each, what the reward function says of it in words.
            of: which prompts the numbers are of.
        """
        asked = self._questions[of]
        sources = [asked.prompts[example][1].data_source for example in examples]
        if asked.hints is None:
            return Judgement(await self._said(batch, sources), self._num_ids)
        found = enumerate(await to_thread(asked.hints.prompts, examples, feedback))
        prompts = {row: prompt for row, prompt in found if prompt is not None}
        said = self._nothing_said(batch)
        if prompts:
            rows = torch.tensor(list(prompts))
            part = batch.bare().rows(rows)
            read = shown(part, list(prompts.values()))
            of_read = await self._said(read, [sources[row] for row in prompts])
            said[torch.isin(batch.row_of_token, rows)] = said_of(part, read, of_read)
        return Judgement(said, self._num_ids)

    def close(self) -> None:
        """Ask served teachers nothing any more."""
        for one in self._served:
            one.close()

    def _nothing_said(self, batch: Sequences) -> Tensor:
        top_k = self._config.teachers.top_k
        return torch.full((batch.num_tokens, *(() if top_k is None else (1 + 2 * top_k,))), torch.nan)

    async def _said(self, batch: Sequences, sources: Sequence[str]) -> Tensor:
        top_k = self._config.teachers.top_k
        if not self._config.teachers.paths:
            return await (self._actor.logprobs(batch) if top_k is None else self._actor.likeliest(batch, top_k))
        chosen = torch.tensor([self._config.teachers.of(source) for source in sources])
        found = self._nothing_said(batch)
        of = [(teacher, (chosen == teacher).nonzero().flatten()) for teacher in chosen[chosen >= 0].unique().tolist()]
        said = await gather(*(self._ask(teacher, batch.bare().rows(rows)) for teacher, rows in of))
        for (_, rows), numbers in zip(of, said, strict=True):
            found[torch.isin(batch.row_of_token, rows)] = numbers
        return found

    async def _ask(self, teacher: int, rows: Sequences) -> Tensor:
        num_loaded = len(self._config.teachers.folders)
        if teacher >= num_loaded:
            return await self._served[teacher - num_loaded].judge(rows, self._config.teachers.top_k)
        assert self._group is not None, "a run with folders has the role"
        return await per_token(self._group, TeacherWorker.logprobs, rows, self._attention_cost, teacher)


_MOST_CUTS = 4
"""Attempts to cut a text by its tokens: without the rest of the text, what stands before a cut may be other tokens."""
_CHARACTERS_PER_TOKEN = 1000
"""More than any token has."""


@dataclasses.dataclass(slots=True)
class Hints:
    """The hints after the prompts of a run, and how they become tokens."""

    hint: str
    """Text with `{ground_truth}`, of the example, or `{feedback}`, of the reward function on a response, or both."""
    train: EncodedPrompts
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    """The longest that a prompt with its hint may be."""
    token_ids: Sequence[Sequence[int]] = ()
    """Prompt of every example with its hint; nothing if that depends on the response."""
    legibility: Legibility | None = None
    """Legibility of all texts so far, if it depends on the response: a vocabulary takes long to look through."""

    @classmethod
    def of(
        cls, hint: str, train: EncodedPrompts, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int
    ) -> Hints:
        """Write a hint after the last message of every prompt, if it is the same for all responses.

        Raises:
            DataError: some are longer than they may be, or have text that the tokenizer does not know.
        """
        hints = cls(hint, train, tokenizer, max_prompt_tokens)
        hinted = [hints._hinted(example, "") for example in train.examples]
        if "{feedback}" in hint:
            return dataclasses.replace(hints, legibility=Legibility.of(tokenizer, texts_of(hinted)))
        try:
            encoded = encode_prompts(tokenizer, hinted, max_prompt_tokens=max_prompt_tokens)
        except DataError as error:
            raise DataError(f"with teacher.hint after each prompt: {error}") from error
        return dataclasses.replace(hints, token_ids=encoded.token_ids)

    def prompts(self, examples: Sequence[int], feedback: Sequence[str]) -> list[Sequence[int] | None]:
        """Return the prompt of each row as the teacher reads it; None without feedback, or if none of it fits.

        Feedback that is too long is cut, and such that cannot be shown, for it has control tokens, is not: nothing that
        a reward function says may end a run. All rows are encoded in one call; call it beside the event loop.

        Args:
            examples: of each row, the number of the example that it answers.
            feedback: of each, what the reward function says of it.
        """
        if self.legibility is None:
            return [self.token_ids[example] for example in examples]
        self.legibility = self.legibility.with_texts(feedback)
        most = _CHARACTERS_PER_TOKEN * self.max_prompt_tokens
        left = {row: said[:most] for row, said in enumerate(feedback) if said}
        found: list[Sequence[int] | None] = [None] * len(examples)
        for attempt in range(1 + _MOST_CUTS):
            hinted = [self._hinted(self.train.examples[examples[row]], said) for row, said in left.items()]
            encoded = zip(left, encode_legible(self.tokenizer, hinted, self.legibility), strict=True)
            written = {row: ids for row, ids in encoded if ids is not None}
            excess = {row: len(ids) - self.max_prompt_tokens for row, ids in written.items()}
            for row, ids in written.items():
                found[row] = ids if excess[row] <= 0 else None
            left = self._cut({row: (left[row], num + attempt) for row, num in excess.items() if num > 0})
        return found

    def _cut(self, texts: Mapping[int, tuple[str, int]]) -> dict[int, str]:
        """Return texts without so many tokens at their end; not those of which nothing is left."""
        if not texts:
            return {}
        said, is_fast = [text for text, _ in texts.values()], bool(self.tokenizer.is_fast)
        encoded = self.tokenizer(said, add_special_tokens=False, return_offsets_mapping=is_fast)
        kept: dict[int, str] = {}
        for place, (row, (text, num)) in enumerate(texts.items()):
            length = len(cast("list[list[int]]", encoded["input_ids"])[place])
            if length <= num:
                continue
            # A slow tokenizer does not say where in the text its tokens are.
            places = cast("list[list[tuple[int, int]]]", encoded["offset_mapping"])[place] if is_fast else ()
            stop = places[length - num - 1][1] if places else len(text) * (length - num) // length
            if stop:
                kept[row] = text[:stop]
        return kept

    def _hinted(self, example: Example, feedback: str) -> Example:
        texts = {"ground_truth": str(example.ground_truth), "feedback": feedback}
        hint = re.sub(r"\{(ground_truth|feedback)\}", lambda place: texts[place[1]], self.hint)
        *before, last = example.prompt
        return dataclasses.replace(example, prompt=(*before, dataclasses.replace(last, content=last.content + hint)))


def shown(batch: Sequences, prompts: Sequence[Sequence[int]]) -> Sequences:
    """Return rows with other prompts.

    Args:
        batch: B rows.
        prompts: of each, the tokens that stand before its first trained one; later sequences of a row stay as they are.
    """
    before = [torch.tensor(prompt) for prompt in prompts]
    starts, stops = (batch.offsets[:-1] + batch.num_prompt_tokens).tolist(), batch.offsets[1:].tolist()
    answers = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
    tokens = [part for prompt, at in zip(before, answers, strict=True) for part in (prompt, batch.tokens[at])]
    lengths = [len(prompt) + at.stop - at.start for prompt, at in zip(before, answers, strict=True)]

    def behind_prompts(marks: Tensor) -> Tensor:
        parts = zip(before, answers, strict=True)
        return torch.cat(
            [part for prompt, at in parts for part in (torch.zeros(len(prompt), dtype=torch.bool), marks[at])]
        )

    return Sequences(
        offsets=offsets_from_lengths(torch.tensor(lengths)),
        tokens=torch.cat(tokens),
        loss_mask=behind_prompts(batch.loss_mask),
        sequence_starts=None if batch.sequence_starts is None else behind_prompts(batch.sequence_starts),
        prompt_index=batch.prompt_index,
        sample_index=batch.sample_index,
    )


def said_of(batch: Sequences, shown: Sequences, said: Tensor) -> Tensor:
    """Return what was said of shown rows at the same tokens of the student's rows: [T', ...] -> [T, ...], else zero."""
    found = said.new_zeros(batch.num_tokens, *said.shape[1:])
    found[batch.loss_mask] = said[shown.loss_mask]
    return found
