"""`rally.train`: `rally train` from Python, with rows, functions, models and recipes that exist only there."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack, cast

from rich.console import Console

from rallypoint.config import RECIPES, TrainerConfig, declare, read
from rallypoint.config.other_projects import other_projects
from rallypoint.display import Progress, Silent
from rallypoint.display.notebook import NotebookPanel, find_notebook
from rallypoint.errors import ConfigError, ModelError, RallyError
from rallypoint.library.episodes import AnyEpisode, episode_keys
from rallypoint.library.launch import launch
from rallypoint.library.rewards import Rewards, specs_of, wanted_columns
from rallypoint.library.run import Run
from rallypoint.library.settings import in_python, of_length, overrides_of, renamed
from rallypoint.prepare.from_python import Data, Model, data_files, model_path
from rallypoint.recipes.interruption import Observer
from rallypoint.recipes.recipe import Recipe
from rallypoint.recipes.use import find_trained
from rallypoint.run.folder import RunFolder

ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a callback hears of a step."""

    number: int
    """Counted from 1."""
    metrics: Mapping[str, float]
    """As in metrics.jsonl, those of a validation after the step included."""
    stop: Callable[[], None] = dataclasses.field(repr=False)
    """Ends the run after this step; its state is saved, and `resume=True` goes on."""


Callback: TypeAlias = Callable[[Step], object]


class Often(TypedDict, total=False):
    """The keys that change most often, by short names."""

    num_steps: int | None
    lr: float | None
    num_prompts: int | None
    group_size: int | None
    max_response_tokens: int | None
    seed: int | None
    name: str | None
    runs_dir: str | Path | None


_OFTEN = {
    "num_steps": "trainer.num_steps",
    "lr": "actor.optimizer.lr",
    "num_prompts": "rollout.num_prompts",
    "group_size": "rollout.group_size",
    "max_response_tokens": "rollout.max_response_tokens",
    "name": "trainer.name",
    "runs_dir": "trainer.runs_dir",
}
"""Short name -> key; `seed` is its own."""


def train(
    recipe: str | Path | Run | type[Recipe],
    *,
    model: Model | Run | None = None,
    data: Data | None = None,
    validation: Data | None = None,
    reward: Rewards | None = None,
    episode: AnyEpisode | None = None,
    config: Mapping[str, object] | None = None,
    callbacks: Callback | Sequence[Callback] = (),
    resume: bool = False,
    from_step: int | None = None,
    display: bool | Progress = True,
    **often: Unpack[Often],
) -> Run:
    """Train a model, and return the run; every check, file and message is that of `rally train`.

    Ctrl-C (in a notebook: interrupt) saves the state and ends the run. Inside a running event loop, as that of a
    notebook, the run has a thread. docs/python.md has examples.

    Args:
        recipe: a shipped recipe (`rally recipes`), a YAML file, the folder of a run with `resume`, or a class of yours.
        model: a folder, a name on the hub, a run, whose newest checkpoint it is, or a model of transformers with its
            tokenizer.
        data: files, or rows: dicts with a `prompt`, and columns that the reward function names.
        validation: the same, for prompts that are never trained on.
        reward: a function, its name, or several functions, whose scores are added up.
        episode: an episode or an agent, which samples a rollout in several turns, or its name; None: a single turn.
        config: any other keys, dotted or as sections: {"kl": None, "rollout.top_p": 0.9}.
        callbacks: called after each step, in their order; one that raises ends the run.
        resume: whether to go on from the newest checkpoint.
        from_step: with `resume`, from the checkpoint of that step.
        display: whether to show the run, or a display of yours.
        often: see `Often`; `num_steps` goes before the epochs of a recipe. Any other name is looked up as a key, whose
            error suggests the right one.

    Raises:
        RallyError: a wrong config, data, model or reward, before anything is started; or what ended the run.
    """
    of_trl = other_projects().trl.arguments
    if wrong := [f"{name}: {of_trl[name]}" for name in often if name in of_trl]:
        raise ConfigError(tuple(wrong))
    short = {_OFTEN.get(name, name): value for name, value in often.items()}
    keys: dict[str, object] = {**(config or {}), **{key: value for key, value in short.items() if value is not None}}
    with contextlib.ExitStack() as given:
        specs = None if reward is None else specs_of(reward, given)
        keys |= _rewards(specs) | episode_keys(episode, given)
        watch = _Watch((callbacks,) if callable(callbacks) else tuple(callbacks))
        try:
            named, of_recipe = _named(recipe, given)
            keys = of_recipe | keys
            overrides = overrides_of(keys)
            overrides += of_length(named, overrides)
            model = _trained(model) if isinstance(model, Run) else model
            overrides += overrides_of(_material(named, overrides, model, data, validation, wanted_columns(specs)))
            return _launched(named, overrides, watch, resume, from_step, display)
        except RallyError as error:
            if (ours := renamed(error)) is error:
                raise
            raise ours from None


def _launched(
    named: str,
    overrides: Sequence[str],
    watch: Observer,
    resume: bool,
    from_step: int | None,
    display: bool | Progress,
) -> Run:
    def start() -> tuple[RunFolder, bool]:
        console, progress = Console(quiet=display is False), _progress(display)
        return launch(
            named,
            overrides,
            console,
            resume=resume,
            from_step=from_step,
            progress=progress,
            observer=watch,
            in_words_of=in_python,
        )

    folder, _ = _beside_a_loop(start, watch)
    return Run(folder.path)


def _trained(run: Run) -> str:
    """Return the folder of what a run has trained.

    Raises:
        ModelError: it has no checkpoint yet, or that of an adapter.
    """
    trained = find_trained(str(run.folder))
    if trained.base is None:
        return trained.path
    raise ModelError(
        f"model: {run.folder} has trained an adapter: merge it with `rally export {run.folder} FOLDER`, and give "
        "model=FOLDER; or go on with it: config={'model.lora': {'path': '" + trained.path + "'}} and its own model"
    )


class _Watch(Observer):
    """Calls the callbacks."""

    owns_process = False

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._is_stopped = False

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        for callback in self._callbacks:
            callback(Step(step, metrics, self._stop))
        return self._is_stopped

    def _stop(self) -> None:
        self._is_stopped = True


_OF_RUNS: list[tuple[str, type[Recipe]]] = []
"""The classes of the runs under way, and the names that their configs have for them."""
_NAMING = threading.Lock()


def _named(recipe: str | Path | Run | type[Recipe], stack: contextlib.ExitStack) -> tuple[str, dict[str, object]]:
    """Return the name under which a recipe's config is found, and the keys that name a class until the stack ends."""
    if isinstance(recipe, Run):
        return str(recipe.folder), {}
    if not isinstance(recipe, type):
        return str(recipe), {}
    pages = {_name_of_page(spec.page): spec for spec in tuple(RECIPES.values())}
    found = [spec for each in recipe.__mro__ if (spec := pages.get(_name_of_page(each))) is not None]
    if not found:
        raise ConfigError(
            (
                f"{recipe.__name__} is not derived from a recipe that is declared: derive it from one, such as "
                "rallypoint.recipes.grpo.GRPO, or declare it with rallypoint.config.declare",
            )
        )
    base = found[0]
    shipped = next((each.name for each in found if isinstance(each.page, str)), base.name)
    if base.page == _name_of_page(recipe):
        return shipped, {}
    with _NAMING:
        others = {name for name, page in _OF_RUNS if page is not recipe}  # in other threads
        numbered = (f"{recipe.__name__}-{number}" for number in itertools.count(2))
        name = next(name for name in itertools.chain([recipe.__name__], numbered) if name not in others)
        spec = dataclasses.replace(base, name=name, page=recipe)
        if (known := RECIPES.get(name)) is not None and isinstance(known.page, type):
            RECIPES[name] = spec  # an earlier state of a cell of a notebook
        declare(spec)
        _OF_RUNS.append((name, recipe))
        stack.callback(_OF_RUNS.remove, (name, recipe))
    return shipped, {"recipe": name}


def _name_of_page(page: str | type) -> str:
    return page if isinstance(page, str) else f"{page.__module__}:{page.__qualname__}"


def _rewards(specs: str | Mapping[str, str] | None) -> dict[str, object]:
    """Return the keys that name the rewards."""
    if specs is None:
        return {}
    if isinstance(specs, str):
        return {"reward.function": specs}
    return {
        "reward.function": None,
        "reward.functions": [{"name": name, "function": spec} for name, spec in specs.items()],
    }


def _material(
    recipe: str,
    overrides: Sequence[str],
    model: Model | None,
    data: Data | None,
    validation: Data | None,
    wanted: Sequence[str],
) -> dict[str, object]:
    """Return the keys that name model and data, which are written where they are in memory only."""
    if model is None and data is None and validation is None:
        return {}
    trainer = cast("Mapping[str, Any]", read(recipe, overrides).values.get("trainer") or {})
    store = TrainerConfig(runs_dir=str(trainer.get("runs_dir") or TrainerConfig().runs_dir)).local_dir / "given"
    found: dict[str, object] = {}
    if model is not None:
        found |= {"model.path": model_path(model, store), "model.create": None}
    if data is not None:
        found |= {"data.train": data_files(data, store, wanted), "data.generate": None}
    if validation is not None:
        found["data.validation"] = data_files(validation, store, wanted)
    return found


def _progress(display: bool | Progress) -> Progress | None:
    if isinstance(display, Progress):
        return display
    if not display:
        return Silent()
    show = find_notebook()
    return None if show is None else NotebookPanel(show)


def _beside_a_loop(run: Callable[[], ResultT], watch: Observer) -> ResultT:
    """Return what a function returns; where an event loop runs in this thread, it has a thread of its own.

    An interrupt asks the run to end, and waits for it; a second one does not let it save.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1, "rally.train") as thread:
        training = thread.submit(contextvars.copy_context().run, run)
        while not training.done():
            try:
                wait([training])
            except KeyboardInterrupt:
                watch.ask()
        try:
            return training.result()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
