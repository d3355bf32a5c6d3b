"""State that survives."""

from rallypoint.checkpoint.store import MANIFEST, checkpoint_name, prune, steps, verify, writing

__all__ = ["MANIFEST", "checkpoint_name", "prune", "steps", "verify", "writing"]
