"""Runs a command until it ends or the process that wanted it does; nothing of it stays. Needs Python alone.

    python launch.py FOLDER COMMAND...

Both end at SIGTERM. When the other end of standard input is gone FOLDER is removed as well: nobody will start again.
It must be the first process of a group of its own. Everything that the command starts is of that group, and ends with
it.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 5.0


def main() -> None:
    """Wait for one end or the other."""
    folder, *command = sys.argv[1:]

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def end(*_signal: object) -> None:
        child.terminate()  # so that it gives its shared memory back
        threading.Timer(GRACE_S, os.killpg, (0, signal.SIGKILL)).start()

    def watch() -> None:
        sys.stdin.buffer.read()
        shutil.rmtree(folder, ignore_errors=True)
        end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, daemon=True).start()
    status = child.wait()
    print(f"rallypoint: the server ended with status {status}", flush=True)
    time.sleep(0.2)  # for what cleans up behind it
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
