"""Weight sync: from the ranks of the actor to those of the rollout role.

Must not know: what the roles do, and when weights are published.
"""

from rallypoint.weights.checksums import digested as digested
from rallypoint.weights.endpoints import Receiver as Receiver, Sender as Sender
from rallypoint.weights.exposed import Exposed as Exposed
from rallypoint.weights.manifest import HEADER_BYTES as HEADER_BYTES, Held as Held, Manifest as Manifest
from rallypoint.weights.shared import SharedWeights as SharedWeights, share_trained as share_trained
from rallypoint.weights.transfer import Participant as Participant, TransferPlan as TransferPlan
from rallypoint.weights.transports import Transport as Transport, join as join
