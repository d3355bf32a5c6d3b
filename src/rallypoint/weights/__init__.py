"""Weight sync: from the ranks of the actor to those of the rollout role.

Must not know: what the roles do, and when weights are published.
"""

from rallypoint.weights.checksums import fingerprint
from rallypoint.weights.endpoints import Receiver, Sender
from rallypoint.weights.exposed import Exposed
from rallypoint.weights.manifest import HEADER_BYTES, Held, Manifest
from rallypoint.weights.shared import SharedWeights, share_trained
from rallypoint.weights.transfer import Participant, TransferPlan
from rallypoint.weights.transports import Transport, join

__all__ = [
    "HEADER_BYTES",
    "Exposed",
    "Held",
    "Manifest",
    "Participant",
    "Receiver",
    "Sender",
    "SharedWeights",
    "TransferPlan",
    "Transport",
    "fingerprint",
    "join",
    "share_trained",
]
