"""Publish and load: weights from the ranks of the actor to those of the rollout role."""

from rallypoint.weights.fingerprint import fingerprint
from rallypoint.weights.line import Line, Member, Plan
from rallypoint.weights.stream import HEADER_BYTES, Held, Manifest, Sink, Source
from rallypoint.weights.ways import join

__all__ = ["HEADER_BYTES", "Held", "Line", "Manifest", "Member", "Plan", "Sink", "Source", "fingerprint", "join"]
