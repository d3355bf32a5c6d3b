"""Ends a process that would otherwise wait for trackers that were left behind, such as in an exit hook of wandb's.

Owns: that the end of a process is not held for ever. Must not know: trackers, but for their names.
"""

from __future__ import annotations

import os
import sys
import threading
import time

GRACE_S = 10.0
"""Seconds that a process has, after its main thread, to end by itself."""
_left: list[str] = []


def leave_behind(name: str) -> None:
    """Remember that a tracker hangs, and end this process some seconds after its main thread if something holds it."""
    _left.append(name)
    if len(_left) == 1:
        threading.Thread(target=_end_after_main, name="end of the process", daemon=True).start()


def is_anyone_left_behind() -> bool:
    """Return whether the end of this process may hang."""
    return bool(_left)


def _end_after_main() -> None:
    threading.main_thread().join()
    time.sleep(GRACE_S)  # threads and exit hooks run meanwhile, and this one is gone when they are done
    names = " and ".join(_left)
    print(f"{names} still held this process {GRACE_S:.0f} s after its end, so it was ended", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(vars(sys).get("last_value") is not None))  # 1 after an error that nobody caught, as Python does
