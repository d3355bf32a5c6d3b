"""Runs a command until it ends or the process that started this one does; no child stays. Needs Python alone.

    python launch.py FOLDER COMMAND...

Both end at SIGTERM. When standard input is closed, FOLDER is removed, too: nobody will start the command again. This
must be the first process of its own process group, which ends with all that the command has started. It ends even if
this process is killed, as Ray does with the children of a worker that it ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 5.0


def end_with_this(child: int) -> None:
    """Fork a process that waits for the end of this one, and then ends the group."""
    ended, held = os.pipe()
    if os.fork():
        os.close(ended)  # the other end is open as long as this process lives
        return
    os.close(held)
    os.read(ended, 1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
        time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command, and wait for either end."""
    folder, *command = sys.argv[1:]

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    end_with_this(child.pid)

    def end(*_signal: object) -> None:
        child.terminate()  # so that it frees its shared memory
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
