"""Publish and load: weights from the ranks of the actor to those of the rollout role."""

from rallypoint.weights.digests import fingerprint
from rallypoint.weights.line import Line, Member, Plan
from rallypoint.weights.manifest import HEADER_BYTES, Held, Manifest
from rallypoint.weights.shared import Exposed, SharedWeights, share, share_trained
from rallypoint.weights.stream import Sink, Source
from rallypoint.weights.ways import join

__all__ = [
    "HEADER_BYTES",
    "Exposed",
    "Held",
    "Line",
    "Manifest",
    "Member",
    "Plan",
    "SharedWeights",
    "Sink",
    "Source",
    "fingerprint",
    "join",
    "share",
    "share_trained",
]
