"""A run that takes seconds: a tiny model, a few steps, everything else as shipped."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from forks import ForkedRally

from rallypoint.display import Silent
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.run.folder import RunFolder, create_run, open_run

TINY = (
    "model.create={hidden_size: 16, num_layers: 1, num_heads: 2, num_key_value_heads: 1, intermediate_size: 32}",
    "data.generate={num_digits: 3, num_train_prompts: 64, num_validation_prompts: 16}",
    "rollout={num_prompts: 8, group_size: 4, max_response_tokens: 5}",
    "actor.num_mini_batches=2",
    "critic.num_mini_batches=2",
    "actor.optimizer={lr: 3e-3, warmup_ratio: 0.25}",
    "critic.optimizer={lr: 3e-3, warmup_ratio: 0.25}",
    "kl={coef: 1e-2, placement: loss, estimator: k3}",
    "trainer.num_steps=4",
    "validation.every_steps=2",
)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Starts tiny runs below a folder of their own."""

    folder: Path

    def overrides(self, name: str, *more: str) -> list[str]:
        unread = ("critic.",) if "recipe=grpo" in more else ("critic.", "kl=") if "recipe=opd" in more else ()
        tiny = [override for override in TINY if not override.startswith(unread)]
        return [*tiny, f"trainer.runs_dir={self.folder}", f"trainer.name={name}", *more]

    def run(self, name: str, *more: str, recipe: str = "digits") -> RunFolder:
        """Run to the end in this process."""
        return self.run_with(recipe, self.overrides(name, *more))

    def run_with(self, recipe: str, overrides: list[str]) -> RunFolder:
        loaded = load_checked(recipe, overrides)
        run = create_run(loaded)
        assert train(loaded, run, Silent(), resume=False)
        return run

    def resume(self, name: str, *more: str) -> RunFolder:
        path = self.folder / name
        run = open_run(path)
        assert train(load_checked(str(path), more), run, Silent(), resume=True)
        return run

    def start(self, *arguments: str, kill_before: str | None = None) -> ForkedRally:
        """Start the command line in a process of its own; see `ForkedRally`."""
        return ForkedRally([*arguments], kill_before=kill_before)

    def start_fresh(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command line in a new interpreter, as a user does."""
        return subprocess.Popen(
            [sys.executable, "-m", "rallypoint.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def weights_of(run: RunFolder) -> dict[str, str]:
    """Digests of all that a run's newest checkpoint holds besides the manifest: weights and optimizer state."""
    newest = max(run.checkpoints.iterdir())
    return {
        str(path.relative_to(newest)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(newest.rglob("*.safetensors"))
    }
