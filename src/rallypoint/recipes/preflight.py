"""A config and the files that it names, checked together before anything is started.

Nothing here imports torch or ray, and none of the user's code is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rallypoint.config import LoadedConfig, Problem, RunConfig, load_config
from rallypoint.data.files import check_dataset_path, check_dataset_rows
from rallypoint.environments.reward import check_reward_spec


def load_checked(name: str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load a config whose files are there.

    Args:
        name: a shipped recipe, a YAML file, or the folder of a run.
        overrides: dotted keys and YAML values, such as `actor.optimizer.lr=3e-4`.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    return load_config(name, overrides, look=file_problems)


def file_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield every named file that is missing, empty or not what it should be."""
    if config.model.path is not None:
        yield from _model("model.path", config.model.path)
    if config.critic.path is not None and config.recipe == "ppo":
        yield from _model("critic.path", config.critic.path)
    for name, paths in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        for path in paths:
            yield from _data(name, path)
    reward = check_reward_spec(config.reward.function)
    if reward is not None:
        yield Problem(("reward.function",), f"reward.function={config.reward.function!r}: {reward}")
    runs = Path(config.trainer.runs_dir).expanduser()
    if runs.exists() and not runs.is_dir():
        yield Problem(("trainer.runs_dir",), f"trainer.runs_dir={str(runs)!r} is a file; expected a folder")
    name = config.trainer.name
    if name is not None and (not name or Path(name).name != name or name.startswith(".")):
        yield Problem(("trainer.name",), f"trainer.name={name!r}: expected a plain folder name without `/`")


def is_hub_name(path: str) -> bool:
    """Whether a model's path can only be the name of a repository on the Hugging Face hub.

    >>> is_hub_name("Qwen/Qwen3-0.6B"), is_hub_name("./model"), is_hub_name("a/b/c")
    (True, False, False)
    """
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).parent.exists()


def _model(name: str, path: str) -> Iterator[Problem]:
    folder = Path(path).expanduser()
    if is_hub_name(path):
        return
    if not folder.is_dir():
        what = "is a file, expected a folder" if folder.exists() else f"no such folder (looked in {Path.cwd()})"
        yield Problem((name,), f"{name}={path!r}: {what}; a Hugging Face folder has config.json and *.safetensors")
        return
    config = folder / "config.json"
    if not config.is_file():
        yield Problem((name,), f"{name}={path!r}: not a Hugging Face folder, config.json is missing in it")
        return
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Problem((name,), f"{name}={path!r}: config.json is not valid JSON ({error})")
        return
    if not isinstance(content, dict) or "model_type" not in content:
        yield Problem((name,), f"{name}={path!r}: config.json has no model_type, so transformers cannot load it")
    if not any(folder.glob("*.safetensors")):
        yield Problem((name,), f"{name}={path!r}: no *.safetensors in it (pickled .bin weights are not loaded)")


def _data(name: str, path: str) -> Iterator[Problem]:
    problem = check_dataset_path(path) or check_dataset_rows(path)
    if problem is not None:
        yield Problem((name,), f"{name}: {problem}")
