"""Publish and load."""

from rallypoint.weights.snapshot import Snapshot, fingerprint, load, take

__all__ = ["Snapshot", "fingerprint", "load", "take"]
