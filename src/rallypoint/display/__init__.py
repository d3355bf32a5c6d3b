"""What a person sees of a run: the panel, plain lines, the learning curve.

Must not know: torch, Ray, the config; it is given plain numbers and texts (`run.reports`).
"""

from rallypoint.display.curve import save_curve
from rallypoint.display.panel import LivePanel, make_progress
from rallypoint.display.plain import PlainLines
from rallypoint.display.progress import Progress, Silent

__all__ = ["LivePanel", "PlainLines", "Progress", "Silent", "make_progress", "save_curve"]
