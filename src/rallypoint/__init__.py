"""rallypoint: reinforcement learning for language models, from a laptop to a cluster.

Must not know: torch or Ray when it is imported; the page to read first is `rallypoint/recipes/ppo.py`.

The command is `rally`. From Python:

    import rallypoint as rally

    run = rally.train("grpo", model="path/to/model", data=[{"prompt": "1 + 1", "answer": "2"}],
                      reward=lambda completion, answer: float(answer in completion))
"""

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.library.run import Best as Best, Run as Run, load_run as load_run
    from rallypoint.library.training import Step as Step, train as train
    from rallypoint.library.use import evaluate as evaluate, generate as generate

__version__ = "0.1.0"

# OpenMP's threads spin while they wait for each other, and all of them lose time as soon as another process needs a
# core. This lets them sleep; see docs/cpu.md. OpenMP reads it when torch is imported, so it is set here: every process
# of a run imports this package first.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_LIBRARY = {
    "Best": "run",
    "Run": "run",
    "Step": "training",
    "evaluate": "use",
    "generate": "use",
    "load_run": "run",
    "train": "training",
}
"""Names that bring torch along, so that they are imported when they are first used, and where they are."""


def __getattr__(name: str) -> object:
    if name not in _LIBRARY:
        raise AttributeError(f"module 'rallypoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rallypoint.library.{_LIBRARY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIBRARY})
