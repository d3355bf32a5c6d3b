"""A trained model scored on a data set: by single responses, or by the episodes of its run. One process, no Ray.

Owns: what an evaluation has in common with the validation of a run, and so the same numbers. Must not know: how a
response is sampled, what a score means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rallypoint.config import RewardConfig, RolloutConfig
from rallypoint.data import DataSet, Example, load_dataset
from rallypoint.data.prompt_sets import Prompt
from rallypoint.data.tokenizer import TokenTexts
from rallypoint.environments.attempts import measure_attempts
from rallypoint.environments.conversation import TurnInWords, turns_in_words
from rallypoint.environments.environment import Episode
from rallypoint.environments.failures import RewardFailure, RolloutFailure, describe_failures
from rallypoint.environments.grader import Grader, open_grader
from rallypoint.environments.scored import SampledGroup, combine
from rallypoint.environments.scoring import Scoring
from rallypoint.errors import ConfigError, DataError, RewardError
from rallypoint.prepare.own_functions import episode_for, rewards_for
from rallypoint.recipes.play import Play, in_loop
from rallypoint.recipes.use import Asked, Opened, Trained
from rallypoint.run.data_sets import data_sets
from rallypoint.run.folder import RunFolder
from rallypoint.run.step_rollouts import StepRollouts
from rallypoint.sampling.episode_end import Results, scores_of
from rallypoint.sampling.sampled import measure_episodes
from rallypoint.types import Metrics, RolloutBatch, Trajectory, assemble, merge


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """How a model did on a data set."""

    scores: tuple[float, ...]
    """One for each response that could be scored."""
    failures: tuple[RewardFailure, ...]
    num_prompts: int
    num_tokens: int
    num_truncated: int
    best: tuple[Example, str, float]
    worst: tuple[Example, str, float]
    sampled: StepRollouts
    """All rollouts, with their scores."""
    failed: tuple[RolloutFailure, ...] = ()
    """Why rollouts are missing; of episodes."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """As in the validations of a run: pass@k and the like by data source, if there are several responses to a prompt or
    several sources; and what episodes were like."""

    @property
    def mean(self) -> float:
        """Mean score of the responses that have one."""
        return sum(self.scores) / len(self.scores)

    def rollouts(self) -> list[dict[str, Any]]:
        """Return every rollout with the columns of docs/tracking.md; the step is 0."""
        return [dict(row) for row in self.sampled.table(0).to_pylist(maps_as_pydicts="strict")]


def evaluate(
    trained: Trained,
    data: Sequence[str],
    *,
    reward: str | Mapping[str, str] | None,
    asked: Asked,
    max_prompts: int | None,
    say: Callable[[str], None],
    episode: str | None = None,
) -> Evaluation:
    """Sample responses to every prompt of a data set, or play episodes, and score them.

    Args:
        trained: the model.
        data: files.
        reward: a function, or several by their names, whose scores are added up; None for the run's.
        asked: how.
        max_prompts: the first so many are used; None for all.
        say: given a line for the user.
        episode: name of an episode or agent, `null` for single responses; None for the run's.

    Raises:
        RewardError: no reward function is known or may be run, or it failed on every response.
        ConfigError: the episode cannot be loaded, or may not be run.
        DataError: the data set has bad rows.
        ModelError: the folder cannot be loaded.
    """
    config = trained.config
    chosen = episode_for(trained.path, config, episode)
    settings = rewards_for(trained.path, config, reward, is_needed=chosen is None)
    with contextlib.closing(open_grader(settings)) as grader:
        grader.load()
        columns = config.data.columns.named if config and config.data.columns else {}
        dataset = load_dataset([DataSet(path, columns=columns) for path in data])[:max_prompts]
        opened = Opened.of(trained)
        marking = _Marking.begin(grader, opened, len(dataset) * asked.num_samples, say)
        prompts = opened.encode(dataset, on_too_long=config.data.on_too_long if config else "error", say=say)
        if chosen is None:
            batch = opened.answers(prompts, asked)
            marking.scoring.add(0, SampledGroup(batch, [prompts.examples[int(index)] for index in batch.prompt_index]))
        else:
            play = episodes(opened, chosen, settings, asked, say)
            pairs = zip(prompts.token_ids, prompts.examples, strict=True)
            found = in_loop(play.rollouts([Prompt(tuple(ids), one) for ids, one in pairs], asked.num_samples))
            for place, (example, of_prompt) in enumerate(zip(prompts.examples, found, strict=True)):
                marking.add(place, example, of_prompt, is_narrowed=play.params.narrows)
        return marking.end(len(prompts.examples), asked.num_samples)


def watch(
    trained: Trained,
    data: Sequence[str],
    place: int | None,
    *,
    asked: Asked,
    say: Callable[[str], None],
    episode: str | None = None,
) -> AsyncIterator[Sequence[TurnInWords] | RolloutFailure | Evaluation]:
    """Play one episode: yield all turns so far whenever there are more, and at last how it did.

    Args:
        trained: the model.
        data: files; none: the validation data of the run, or else those it trains on.
        place: of the one that is played, from 0; None: one by the seed.
        asked: how.
        say: given a line for the user.
        episode: name of an episode or agent; None for the run's.

    Raises:
        ConfigError: the episode cannot be loaded, or may not be run, at once.
        DataError: there is no such prompt.
    """
    chosen = episode_for(trained.path, trained.config, episode)  # not in the event loop: it may start a server
    if chosen is None:
        raise ConfigError((f"{trained.path} has no rollout.episode; name one: --episode file.py:function",))
    return _watched(trained, data, place, chosen, asked, say)


async def _watched(
    trained: Trained,
    data: Sequence[str],
    place: int | None,
    chosen: Episode | str,
    asked: Asked,
    say: Callable[[str], None],
) -> AsyncIterator[Sequence[TurnInWords] | RolloutFailure | Evaluation]:
    settings = rewards_for(trained.path, trained.config, None, is_needed=False)
    dataset = load_dataset(data or _data_of(trained), require_ground_truth=False)
    place = random.Random(asked.seed).randrange(len(dataset)) if place is None else place
    if place >= len(dataset):
        raise DataError(f"there are {len(dataset)} examples, so no example {place}; they are counted from 0")
    opened = Opened.of(trained)
    prompts = opened.encode(dataset[place : place + 1], on_too_long="error", say=say)
    prompt = Prompt(tuple(prompts.token_ids[0]), prompts.examples[0])
    play, written = episodes(opened, chosen, settings, asked, say), TokenTexts(opened.tokenizer)
    with contextlib.closing(open_grader(settings)) as grader:
        marking = _Marking.begin(grader, opened, 1, say)
        async for found in play.watched(prompt, place):
            if isinstance(found, RolloutFailure):
                yield found
            elif isinstance(found, Trajectory):
                marking.add(place, prompt.example, [found], is_narrowed=play.params.narrows)
                yield marking.end(1, 1)
            else:
                so_far = Trajectory(turns=tuple(found))
                yield turns_in_words(so_far, decode=opened.texts, written=lambda ids: "".join(written(ids)))


def _data_of(trained: Trained) -> Sequence[str | Path | DataSet]:
    """Return the validation data of a model's run, or else those it trains on."""
    if (config := trained.config) is None:
        raise DataError(f"{trained.path} does not lie in a run folder, so name the examples: --data FILE")
    if config.data.generate is not None and not config.data.train:
        return [RunFolder(Path(trained.path).parent.parent).data / "validation.parquet"]
    return data_sets(config, "data.validation") or data_sets(config, "data.train")


def episodes(
    opened: Opened, episode: Episode | str, rewards: RewardConfig, asked: Asked, say: Callable[[str], None]
) -> Play:
    """Return what episodes are played with: as in training, where the model comes from a run."""
    config = opened.trained.config
    rollout = config.rollout if config else RolloutConfig()
    limit, room = opened.response_limit(asked), opened.engine.max_request_tokens
    return Play(
        episode=episode,
        engine=opened.engine,
        tokenizer=opened.tokenizer,
        params=opened.params(asked, limit),
        max_tokens=min(room, config.data.max_prompt_tokens + limit) if config else room,
        rollout=rollout,
        results=Results(may_have_none=bool(rewards.all_functions), has_functions=bool(rewards.functions)),
        say=say,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Marking:
    """Rollouts on their way to an evaluation."""

    scoring: Scoring
    rollouts: list[Trajectory] = dataclasses.field(default_factory=list[Trajectory])
    """Those of episodes."""
    failed: list[RolloutFailure] = dataclasses.field(default_factory=list[RolloutFailure])

    @classmethod
    def begin(cls, grader: Grader, opened: Opened, num_rows: int, say: Callable[[str], None]) -> Self:
        """Return what scores at most so many rollouts."""
        texts = TokenTexts(opened.tokenizer)
        return cls(Scoring(grader, decode=opened.texts, token_texts=texts, num_rows=num_rows, warn=say))

    def add(
        self, place: int, example: Example, found: Sequence[Trajectory | RolloutFailure], *, is_narrowed: bool
    ) -> None:
        """Have the episodes of a prompt scored, by themselves or by the function."""
        kept = {number: one for number, one in enumerate(found) if isinstance(one, Trajectory)}
        rows = assemble(list(kept.values()), prompt_index=place, sample_index=list(kept), is_narrowed=is_narrowed)
        self.rollouts.extend(kept.values())
        self.failed.extend(one for one in found if isinstance(one, RolloutFailure))
        given = [*map(scores_of, kept.values())]
        self.scoring.add(place, SampledGroup(rows, [example] * len(rows), given, rollouts=[*kept.values()]))

    def end(self, num_prompts: int, num_samples: int) -> Evaluation:
        """Return how all that was added did.

        Raises:
            RewardError: nothing could be scored.
        """
        self.scoring.finish()
        groups = self.scoring.run()
        scored = combine(groups)
        if not len(scored.batch):
            if self.failed:
                raise RewardError(f"no rollout could be scored: {describe_failures(self.failed)}")
            raise RewardError(f"no response could be scored; the first: {scored.failures[0]}")
        measured = measure_episodes(self.rollouts, self.failed) if self.rollouts else Metrics()
        sampled = StepRollouts.of(RolloutBatch.join([group.rows for group in groups]), scored, groups)
        return _summarised(sampled, num_prompts, num_samples, self.failed, measured)


def _summarised(
    sampled: StepRollouts, num_prompts: int, num_samples: int, failed: Sequence[RolloutFailure], measured: Metrics
) -> Evaluation:
    scored, rows = sampled.scored, sampled.rows
    scores, attempts = scored.batch.scores.tolist(), sampled.attempts()

    def told(place: int) -> tuple[Example, str, float]:
        row = scored.kept_rows[place]
        return sampled.examples[row], sampled.texts[row], scores[place]

    is_plain = num_samples == 1 and len({one.source for one in attempts}) <= 1
    return Evaluation(
        scores=tuple(scores),
        failures=scored.failures,
        num_prompts=num_prompts,
        num_tokens=rows.num_loss_tokens,
        num_truncated=int(rows.truncated.sum()),
        best=told(max(range(len(scores)), key=scores.__getitem__)),
        worst=told(min(range(len(scores)), key=scores.__getitem__)),
        sampled=sampled,
        failed=tuple(failed),
        metrics=merge({} if is_plain else measure_attempts(attempts, num_samples), measured).scalars(),
    )
