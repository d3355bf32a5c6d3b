"""Groups of ranks and their collectives; torch.distributed only."""

from rallypoint.parallel.collective import Collective, Gloo, Solo, connect

__all__ = ["Collective", "Gloo", "Solo", "connect"]
