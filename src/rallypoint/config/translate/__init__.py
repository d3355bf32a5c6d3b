"""Configs of verl and TRL as ours: by the table that suggests keys for wrong names (`other_projects.yaml`).

Owns: how their configs are written (`reading.py`, `shell.py`), and what follows from several of their keys together
(`verl.py`, `trl.py`). A key that has no counterpart is named, never left out in silence, and no value changes in
silence.

Must not know: verl and TRL themselves, which need not be installed.
"""

from rallypoint.config.translate.table import Translation
from rallypoint.config.translate.trl import from_trl
from rallypoint.config.translate.verl import from_verl

__all__ = ["Translation", "from_trl", "from_verl"]
