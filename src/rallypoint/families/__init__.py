"""Facts about families of models, a file each.

Must not know: torch, transformers, what is made of the facts.
"""

from __future__ import annotations

import importlib
import pkgutil

from rallypoint.families.family import Cut, Family, Norm

__all__ = ["BIASED", "FAMILIES", "MIXTURES", "Cut", "Family", "Norm"]


def _found() -> dict[str, Family]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
        if not module.ispkg
    )
    found = (value for module in modules for value in vars(module).values() if isinstance(value, Family))
    return {family.model_type: family for family in sorted(found, key=lambda family: family.model_type)}


FAMILIES = _found()
"""`model_type` of config.json -> family, in alphabetical order."""
MIXTURES = {name: family for name, family in FAMILIES.items() if family.experts}
"""Those of them that are mixtures of experts."""
BIASED = {name: family for name, family in MIXTURES.items() if family.biased_routers}
"""Those of the mixtures whose routers choose with a bias of each expert."""
