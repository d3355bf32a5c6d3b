"""The page of a run in the browser, and the same in one file: a reader of the run's folder.

Owns: what is shown, and its files.
Must not know: how a fact comes to be, or what trains.
"""

from rallypoint.page.report import write_report
from rallypoint.page.run_reader import RunReader

__all__ = ["RunReader", "write_report"]
