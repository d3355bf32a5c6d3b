"""A model at work from Python: prompts answered, a data set scored."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rallypoint.data.hub import hub_as_found
from rallypoint.errors import DataError, RallyError
from rallypoint.library.episodes import AnyEpisode, episode_spec
from rallypoint.library.rewards import Rewards, specs_of, wanted_columns
from rallypoint.library.run import Run
from rallypoint.library.settings import renamed
from rallypoint.prepare.from_python import Data, Model, data_files, model_path
from rallypoint.recipes.evaluation import Evaluation, evaluate as score
from rallypoint.recipes.use import Asked, Trained, complete, find_trained


def generate(
    model: Model | Run,
    prompts: str | Sequence[str | Sequence[Mapping[str, str]]],
    *,
    temperature: float = 0.0,
    max_response_tokens: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> list[str]:
    """Return a model's answer to each prompt, in their order.

    Args:
        model: a run, a checkpoint, a folder, a name on the hub, or a model of transformers with its tokenizer.
        prompts: texts, each a message of the user, or lists of {role, content}; a prompt that is there several times
            has as many answers.
        temperature: 0 is greedy.
        max_response_tokens: most of an answer; None: as in training, or 512.
        seed: of what is drawn.
        trust_remote_code: whether Python code of the model's folder may run.

    Raises:
        ModelError: the model cannot be loaded, or a prompt is too long for it.
        DataError: a prompt is neither text nor a list of messages.
    """
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    if not several:
        return []
    if isinstance(several[0], Mapping):
        raise DataError("prompts: expected texts or lists of messages, found a message; one conversation is [messages]")
    with _in_words_of_python(), _found(model, trust_remote_code) as (trained, store):
        (file,) = data_files([{"prompt": prompt, "ground_truth": ""} for prompt in several], store)
        asked = Asked(temperature=temperature, max_response_tokens=max_response_tokens, seed=seed)
        return complete(trained, file, asked)


def evaluate(
    model: Model | Run,
    data: Data,
    *,
    reward: Rewards | None = None,
    episode: AnyEpisode | None = None,
    temperature: float = 1.0,
    num_samples: int = 1,
    max_response_tokens: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = print,
) -> Evaluation:
    """Score a model on prompts; `rally eval`, from Python.

    Args:
        model: as for `generate`.
        data: files or rows, as for `train`.
        reward: a function, its name, or several functions, whose scores are added up; None for that of the model's
            run, if it is one that ships, or if you started the run.
        episode: an episode or an agent, or its name; "null" for single responses; None for that of the model's run.
        temperature: 0 is greedy.
        num_samples: responses to each prompt, or episodes.
        max_response_tokens: most of a response; None: as in training, or 512.
        seed: of what is drawn.
        trust_remote_code: whether Python code of the model's folder may run.
        say: called with a line about prompts that are too long, and the like.

    Raises:
        RewardError: no reward function is known, or it failed on every response.
        ConfigError: what is given as reward or episode is none.
        DataError: the data have bad rows.
        ModelError: the model cannot be loaded.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_in_words_of_python())
        trained, store = stack.enter_context(_found(model, trust_remote_code))
        specs = None if reward is None else specs_of(reward, stack)
        files = data_files(data, store, wanted_columns(specs))
        return score(
            trained,
            files,
            reward=specs,
            asked=Asked(temperature, num_samples, max_response_tokens, seed),
            max_prompts=None,
            say=say,
            episode=None if episode is None else episode_spec(episode, stack),
        )


@contextlib.contextmanager
def _in_words_of_python() -> Iterator[None]:
    try:
        yield
    except RallyError as error:
        if (ours := renamed(error)) is error:
            raise
        raise ours from None


@contextlib.contextmanager
def _found(model: Model | Run, trust_remote_code: bool) -> Iterator[tuple[Trained, Path]]:
    """Yield the model, and a folder for what it takes to ask it."""
    with hub_as_found(), tempfile.TemporaryDirectory(prefix="rally-") as store:
        name = str(model.folder) if isinstance(model, Run) else model_path(model, Path(store))
        yield find_trained(name, trust_remote_code=trust_remote_code), Path(store)
