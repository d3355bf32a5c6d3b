"""Facts about families of models, a YAML file each.

Must not know: torch, transformers, what is made of the facts.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from rallypoint.families.family import Cut, Family, Norm

__all__ = ["BIASED", "FAMILIES", "MIXTURES", "Cut", "Family", "Norm"]


def _found() -> dict[str, Family]:
    files = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in Path(__file__).parent.glob("*.yaml"))
    return dict(sorted((name, Family(**facts)) for families in files for name, facts in families.items()))


FAMILIES = _found()
"""`model_type` of config.json -> family, in alphabetical order."""
MIXTURES = {name: family for name, family in FAMILIES.items() if family.experts}
"""The families that are mixtures of experts."""
BIASED = {name: family for name, family in MIXTURES.items() if family.biased_routers}
"""The mixtures whose routers choose with a bias for each expert."""
