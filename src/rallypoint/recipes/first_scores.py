"""What the scores of a run's first steps say about its reward: whether any of them differ.

A reward that gives every answer the same score teaches nothing, and looks like a task that is too hard.
"""

from __future__ import annotations

from rallypoint.config import RunConfig
from rallypoint.environments.given import is_given
from rallypoint.run.rollouts import StepRollouts

NUM_STEPS = 3
"""Steps that are looked at: enough rollouts that a task which is merely hard earns something, mostly."""


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
