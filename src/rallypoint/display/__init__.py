"""What a person sees of a run: the panel, plain lines, the learning curve.

Knows neither torch nor Ray nor the config; is told plain numbers and texts (`run.reports`).
"""

from rallypoint.display.curve import save_curve
from rallypoint.display.panel import LivePanel
from rallypoint.display.plain import PlainLines
from rallypoint.display.progress import Progress, Silent, make_progress

__all__ = ["LivePanel", "PlainLines", "Progress", "Silent", "make_progress", "save_curve"]
