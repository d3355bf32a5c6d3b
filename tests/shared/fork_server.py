"""The process that others are forked from: it has imported torch, transformers and rallypoint, which takes seconds.

Those that test side by side share one, as long as the process that starts them lives.
"""

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

_SHARED = "RALLYPOINT_TEST_FORK_SERVER"
"""Variable with the path of the server's socket, for processes that another one starts."""


def fork_context() -> ForkServerContext:
    """Return what makes processes. The one that they come from is started with the first, unless it is there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rallypoint.recipes.loop", "rallypoint.library.launch", "frozen"])
    server = forkserver._forkserver
    if _SHARED in os.environ and server._forkserver_address is None:
        server._forkserver_address = os.environ[_SHARED]
        server._forkserver_alive_fd = os.pipe()[1]  # each process gets one; this server lives without it
        server.ensure_running = resource_tracker.ensure_running
    return context


def share() -> None:
    """Start it, and have processes that this one starts use it, too."""
    fork_context()
    forkserver._forkserver.ensure_running()
    os.environ[_SHARED] = forkserver._forkserver._forkserver_address
