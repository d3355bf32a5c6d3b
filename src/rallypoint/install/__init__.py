"""Engines that run in Python environments of their own: made, found, removed.

Must not know: what an engine does; it imports none of them.
"""

from rallypoint.install.engines import BUILDS, Build
from rallypoint.install.environment import (
    Environment,
    Installed,
    cache_folder,
    engines_folder,
    find_engine,
    installed_engines,
)

__all__ = [
    "BUILDS",
    "Build",
    "Environment",
    "Installed",
    "cache_folder",
    "engines_folder",
    "find_engine",
    "installed_engines",
]
