"""Settings for every test: shapes of the algorithms are checked at each call, and hypothesis has no deadline."""

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings
from jaxtyping import install_import_hook

assert "rallypoint.algorithms" not in sys.modules, "the hook must come before the first import"
install_import_hook("rallypoint.algorithms", "beartype.beartype")

# Under nohup it is ignored, and the programs that tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Processes of Ray import the test that they belong to, with what it imports.
paths = (str(Path(__file__).with_name("shared")), os.environ.get("PYTHONPATH"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

# Machines are shared and the first example of a run pays for lazy imports, so no example is timed.
settings.register_profile("rallypoint", deadline=None)
settings.load_profile("rallypoint")
