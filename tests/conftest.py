"""Settings for every test: shapes of the algorithms are checked at each call, and hypothesis has no deadline."""

import sys

from hypothesis import settings
from jaxtyping import install_import_hook

assert "rallypoint.algorithms" not in sys.modules, "the hook must come before the first import"
install_import_hook("rallypoint.algorithms", "beartype.beartype")

# Machines are shared and the first example of a run pays for lazy imports, so no example is timed.
settings.register_profile("rallypoint", deadline=None)
settings.load_profile("rallypoint")
