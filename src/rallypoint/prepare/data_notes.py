"""What there is to say of the rows of a run, and of its first scores.

Of rows: which were too long, which occur twice, which no teacher judges. Of the scores of the first steps: whether any
of them differ. A reward that gives every answer the same score teaches nothing, and looks like a task that is too hard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rallypoint.config import RECIPES, RunConfig
from rallypoint.data import EncodedPrompts, EncodedRows, StreamedPrompts, StreamedRows
from rallypoint.data.files import suggestion
from rallypoint.environments.given import is_given
from rallypoint.errors import ConfigError, DataError
from rallypoint.run.step_rollouts import StepRollouts

Training: TypeAlias = EncodedPrompts | EncodedRows | StreamedPrompts | StreamedRows


def say_fates(found: EncodedPrompts | EncodedRows, most: int, say: Callable[[str], None]) -> None:
    """Say which prompts, or rows, were too long."""
    of_rows = isinstance(found, EncodedRows)
    what, cut = ("examples", "cut at their end") if of_rows else ("prompts", "cut at their beginning")
    for names, fate in ((found.dropped, "dropped"), (found.truncated, cut)):
        if names:
            shown = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            say(f"{len(names)} {what} are longer than {most} tokens and were {fate}: {shown}")
    if not isinstance(found, EncodedRows):
        return
    if found.bad:
        say(f"{len(found.bad):,} examples cannot be used and were dropped; the first is {found.bad[0]}")
    if found.shortened:
        say(
            f"the chat template leaves out or rewrites a part of {len(found.shortened):,} turns of the assistant, the "
            f"first in {found.shortened[0]}: that part, such as reasoning before an earlier answer, is not trained; "
            "model.tokenizer.chat_template=FILE names a template that keeps it"
        )
    if found.misaligned:
        say(
            f"{len(found.misaligned):,} examples have a turn of the assistant before which a model asked for it sees "
            f"other tokens, the first in {found.misaligned[0]}: the end of the cue, such as a blank or a line "
            "break, makes one token with an answer, or the template writes it in another way; end the cue before the "
            "blank, and begin the turn of the assistant ({% generation %}) with it"
        )


def repetitions(
    config: RunConfig,
    train: Training,
    validation: EncodedPrompts | EncodedRows | None,
) -> Iterator[str]:
    """Yield notes on what occurs twice in the data or a step, or in training and validation."""
    if isinstance(train, EncodedRows) and not train.is_part:
        epochs, num = config.trainer.num_epochs, config.num_examples
        num = num if epochs is None else min(num, math.ceil(epochs * len(train)))
        if len(train) < num:
            yield (
                f"a step takes {num} examples (data.num_examples={config.num_examples}), and the data have only "
                f"{len(train)}: it trains on them {-(-num // len(train))} times; lower data.num_examples, or add data"
            )
    if isinstance(train, EncodedRows):
        yield from _repeated_rows(config, train, validation)
    yield from _drawn_again(config)
    if not isinstance(train, EncodedPrompts):
        return
    wanted, repeats = config.rollout.num_prompts, train.repeats()
    if repeats and config.data.generate is None:  # a small task is repeated on purpose
        (first, again), others = repeats[0], sum(one.ground_truth != before.ground_truth for before, one in repeats)
        yield (
            f"{len(repeats):,} of {len(train.examples):,} prompts stand there before: the first is {again.name}, the "
            f"same as {first.name}" + (f"; {others:,} of them with another ground truth" if others else "")
        )
    if train.num_distinct < wanted and not train.is_part:
        yield (
            f"a step takes rollout.num_prompts={wanted} prompts, and the data have only {train.num_distinct:,} that "
            f"differ: every step samples the same ones {-(-wanted // train.num_distinct)} times; lower "
            "rollout.num_prompts and raise rollout.group_size, or add data"
        )
    if isinstance(validation, EncodedPrompts) and (shared := set(validation.token_ids) & set(train.token_ids)):
        num_rows = sum(ids in shared for ids in validation.token_ids)
        yield (
            f"{num_rows:,} of {len(validation.examples):,} validation prompts are trained on too: validation/score "
            "will say more than is true"
        )


def _drawn_again(config: RunConfig) -> Iterator[str]:
    """Yield a note if a run of so many epochs may take more prompts than these have."""
    epochs = config.trainer.num_epochs
    if epochs is not None and config.rollout.dynamic_sampling:
        yield (
            f"trainer.num_epochs={epochs:g} is of the prompts that are trained on, and groups that "
            "rollout.dynamic_sampling replaces take further ones: the more are replaced, the more prompts come again "
            "before the last step; data/epoch counts all passes over the data"
        )


def _repeated_rows(
    config: RunConfig, train: EncodedRows, validation: EncodedPrompts | EncodedRows | None
) -> Iterator[str]:
    """Yield the same of conversations and pairs, which are equal if all their tokens are."""
    firsts: dict[bytes, str] = {}
    pairs = [(firsts.setdefault(key, name), name) for key, name in zip(train.digests(), train.names, strict=True)]
    if repeats := [(first, name) for first, name in pairs if first != name]:
        first, again = repeats[0]
        yield (
            f"{len(repeats):,} of {len(train):,} examples stand there before: the first is {again}, the same as {first}"
        )
    if isinstance(validation, EncodedRows) and (num := sum(key in firsts for key in validation.digests())):
        yield (
            f"{num:,} of {len(validation):,} validation examples are trained on too: "
            f"validation/{RECIPES[config.recipe].validated} will say more than is true"
        )


def check_truths(config: RunConfig, prompts: EncodedPrompts) -> None:
    """Refuse prompts without the right answer that a hint shows.

    Raises:
        DataError: there are some.
    """
    if not RECIPES[config.recipe].reads("teacher") or "{ground_truth}" not in (config.teachers.hint or ""):
        return
    without = [one.name for one in prompts.examples if one.ground_truth is None or not str(one.ground_truth).strip()]
    if without:
        raise DataError(
            f"{len(without):,} of {len(prompts):,} prompts have no ground truth, which teacher.hint shows: the first "
            f"is {without[0]}; give each its right answer, or leave the row out"
        )


def check_sources(config: RunConfig, train: Training, validation: EncodedPrompts | EncodedRows | None) -> None:
    """Refuse teachers of sources that no prompt is of: without a teacher a prompt is sampled for nothing.

    Raises:
        ConfigError: teacher.by_source names some; or no prompt of the validation has a teacher, and there is no reward.
    """
    teachers = config.teachers
    if not RECIPES[config.recipe].reads("teacher") or not teachers.paths:
        return
    if isinstance(validation, EncodedPrompts) and not validation.is_part and not config.is_rewarded:
        _check_judged(config, validation)
    if not isinstance(train, EncodedPrompts) or train.is_part:
        return
    there = train.sources
    if strangers := [source for source in teachers.by_source if source not in there]:
        found, more = ", ".join(map(repr, there[:8])), " ..." if len(there) > 8 else ""
        raise ConfigError(
            tuple(
                f"teacher.by_source.{source}={teachers.by_source[source]!r}: no prompt of data.train has data_source "
                f"{source!r}{suggestion(source, there)}; there are {found}{more}"
                for source in strangers
            )
        )


def _check_judged(config: RunConfig, validation: EncodedPrompts) -> None:
    """Refuse a validation that no teacher judges, where no reward does either."""
    if any(config.teachers.of(source) >= 0 for source in validation.sources):
        return
    found, has = " or ".join(map(repr, validation.sources[:8])), ", ".join(config.teachers.by_source)
    problem = (
        f"data.validation: no prompt of it has a teacher, by which it would be judged: its data_source is {found}, "
        f"and teacher.by_source has {has}; set teacher.path, or leave data.validation out"
    )
    raise ConfigError((problem,))


NUM_STEPS = 3
"""Steps that are looked at: in so many rollouts a task that is merely hard has usually earned something."""


class FirstScores:
    """The scores of the first steps, in memory that does not grow."""

    def __init__(self) -> None:
        self._num_steps, self._num_scores = 0, 0
        self._constant: float | None = None
        """The score of all rollouts so far."""
        self._differ = False
        self._number: str | None = None
        """The first ground truth that is a number, with its row."""
        self._only_numbers = True
        self._applies: dict[str, bool] = {}
        """Whether each of several rewards had a score for some rollout."""

    def add(self, rollouts: StepRollouts, config: RunConfig, run: str) -> str | None:
        """Add a step; after the last of the first ones, return what is to be said of them, if anything.

        Args:
            rollouts: of the step.
            config: of the run.
            run: what `rally check-reward` is told to find the reward.
        """
        if self._num_steps == NUM_STEPS or not config.reward.all_functions or config.rollout.dynamic_sampling:
            return None  # dynamic sampling has an error of its own
        self._num_steps += 1
        batch = rollouts.scored.batch
        scores = batch.scores.tolist()  # before a penalty for length
        parts = batch.scores[:, None] if batch.reward_parts is None else batch.reward_parts
        for name, applies in zip(batch.part_names, (~parts.isnan()).any(0).tolist(), strict=False):
            self._applies[name] = applies or self._applies.get(name, False)
        parts = parts.nan_to_num(nan=0.0)  # it adds nothing
        self._num_scores += len(scores)
        if scores and self._constant is None:
            self._constant = scores[0]
        self._differ |= any(score != self._constant for score in scores) or bool((parts != parts[:1]).any())
        for example in rollouts.examples:
            is_number = isinstance(example.ground_truth, int | float)  # True and False, too
            self._only_numbers &= is_number
            if is_number and self._number is None:
                self._number = f"{example.ground_truth!r} in {example.name}"
        if self._num_steps < NUM_STEPS:
            return None
        return "; ".join(filter(None, (self._never_applied(), self._words(config, run)))) or None

    def _never_applied(self) -> str | None:
        names = [name for name, applies in self._applies.items() if not applies]
        if not names:
            return None
        return (
            f"the reward {', '.join(names)} returned None for all {self._num_scores:,} scored rollouts of the first "
            f"{NUM_STEPS} steps, so it has no part in any score: None means that it does not apply; without `return` a "
            "function returns None, too"
        )

    def _words(self, config: RunConfig, run: str) -> str | None:
        if self._differ or self._constant is None:
            return None
        said = (
            f"all {self._num_scores:,} scores of the first {NUM_STEPS} steps are {self._constant:g}, which tells no "
            "answer from another"
        )
        if self._constant == 0 and self._only_numbers:
            said += (
                f". The ground truths are numbers ({self._number}) and answers are texts, which are never equal: "
                "compare solution_str with str(ground_truth), or numbers with numbers"
            )
        if any(is_given(one.function) for one in config.reward.all_functions):
            return f"{said}. Call the reward function with a right and a wrong answer: their scores must differ"
        return f"{said}. See what the reward makes of right and wrong answers: rally check-reward {run}"
