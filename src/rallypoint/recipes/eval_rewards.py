"""Which rewards score a model outside of training: those that are named, or those of its run.

Must not know: models and batches. A run folder may be somebody else's: only the code of runs that this user has started
is run without being named again; see `run/trust.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rallypoint.config import RewardConfig, RunConfig
from rallypoint.config.sections.material import RewardFunctionConfig
from rallypoint.environments.given import how_to_give_for_eval, is_given
from rallypoint.errors import RewardError
from rallypoint.run.folder import RunFolder
from rallypoint.run.trust import unsigned


def rewards_for(path: str, config: RunConfig | None, reward: str | Mapping[str, str] | None) -> RewardConfig:
    """Return the rewards of an evaluation.

    Args:
        path: of the model, for messages.
        config: of the run that made the model; None if it lies in none.
        reward: a function that is named, or several by their names, whose scores are added up; None for the run's.

    Raises:
        RewardError: none is named, and the run has none that may be run here.
    """
    if not reward:
        return _of_run(path, config)
    several = {} if isinstance(reward, str) else reward
    named = {
        "function": reward if isinstance(reward, str) else None,
        "functions": tuple(RewardFunctionConfig(name=name, function=spec) for name, spec in several.items()),
        "parameters": {},
    }
    found = (config.reward if config else RewardConfig()).model_copy(update=named)
    for problem in found.problems():
        raise RewardError(problem)
    return found


def _of_run(path: str, config: RunConfig | None) -> RewardConfig:
    if config is None:
        raise RewardError(f"{path} does not lie in a run folder, so name the reward: --reward file.py:function")
    functions = [one.function for one in config.reward.all_functions]
    if "rollout" not in config.roles:
        raise RewardError(f"the run of {path} had no rewards; name one: --reward file.py:function")
    if not functions:
        raise RewardError(
            f"the run of {path} has a reward model, which is asked in training only, and no function; "
            "name one: --reward file.py:function"
        )
    if given := [spec for spec in functions if is_given(spec)]:
        raise RewardError(how_to_give_for_eval(given[0]))
    foreign = unsigned(config, RunFolder(Path(path).parent.parent).state().launched.signed)
    if own := [spec for key, spec in config.reward.named_functions.items() if key in foreign]:
        raise RewardError(
            "the reward of this run is a file's, and you did not start that run on this machine: a run folder does not "
            f"decide what is run here; if you know and trust it, name it: --reward {own[0]}"
        )
    if urls := [foreign[key] for one in config.reward.all_functions if (key := f"reward.{one.name}.url") in foreign]:
        raise RewardError(
            f"the reward of this run asks {urls[0]}, and you did not start that run on this machine: a run folder does "
            "not decide where responses are sent; name another reward: --reward file.py:function"
        )
    return config.reward
