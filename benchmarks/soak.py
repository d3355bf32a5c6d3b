"""A kill every 30 seconds: the share of time in steps that counted.

    python benchmarks/soak.py --minutes 20

`rally train digits` on Ray, without an end. Every so often a process of a role, drawn at random, is killed with
SIGKILL. If the run ends, as it does after losses that cost more than half of its time, `--resume` goes on with it, as a
scheduler would.
Steps that were done again count once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rallypoint.journal import RoleLost, RolesRestarted, RolesStarted, read_journal
from rallypoint.run.folder import RunFolder

RALLY = (sys.executable, "-m", "rallypoint.cli.main", "train")
APART = ("cluster.pools={main: [1], side: [1]}", "rollout.placement.pool=side")


def processes_of(run: RunFolder) -> dict[str, int]:
    """Return the newest process of the first rank of each role."""
    found: dict[str, int] = {}
    for entry in read_journal(run.journal):
        if isinstance(entry.event, RolesStarted | RolesRestarted):
            found |= {role: int(ranks[0].partition("@")[0]) for role, ranks in entry.event.processes.items()}
    return found


def killed(run: RunFolder, draw: random.Random) -> bool:
    """Kill the process of a role; return whether there was one."""
    if not (there := processes_of(run)):
        return False
    role = draw.choice(sorted(there))
    try:
        os.kill(there[role], signal.SIGKILL)
    except ProcessLookupError:
        return False
    print(f"killed {role}, pid {there[role]}", flush=True)
    return True


def main(minutes: float, every_s: float, keys: list[str]) -> None:
    """Run, kill, and print the share."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run, draw = RunFolder(Path(folder) / "soak"), random.Random(0)
        own = (
            f"trainer.runs_dir={folder}",
            "trainer.name=soak",
            "trainer.num_steps=1000000",
            "checkpoint.every_steps=20",
        )
        log = (Path(folder) / "log").open("w")
        command, num_kills, num_starts = [*RALLY, "digits", *APART, *own, *keys], 0, 0
        driver, began_s, next_s, first = None, 0.0, 0.0, 0
        while not began_s or time.time() < began_s + 60 * minutes:
            if driver is None or driver.poll() is not None:
                driver, num_starts = subprocess.Popen(command, stdout=log, stderr=log), num_starts + 1
                command = [*RALLY, str(run.path), "--resume"]
            if not began_s and (state := run.state()).steps:
                began_s = time.time()  # the first start is no loss
                next_s, first = began_s + every_s, state.step
            if began_s and time.time() >= next_s:
                num_kills += killed(run, draw)
                next_s += every_s
            time.sleep(0.5)
        assert driver is not None
        driver.send_signal(signal.SIGTERM)
        driver.wait()
        state, passed_s = run.state(), time.time() - began_s
        counted_s = sum(step.seconds for number, step in state.steps.items() if number > first)
        back = [one.seconds for one in state.losses if isinstance(one, RolesRestarted)]
        print(f"{num_kills} kills in {passed_s / 60:.1f} minutes, {num_starts - 1} resumes by --resume")
        print(f"{len([one for one in state.losses if isinstance(one, RoleLost)])} losses; back after", end=" ")
        print(f"{sum(back) / max(len(back), 1):.1f} s on average, {max(back, default=0.0):.1f} s at most")
        print(f"{counted_s / passed_s:.0%} of the time in steps that counted, {state.step - first} of them")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    main(given.minutes, given.every, given.keys)
