"""Runs the tests that failed once more, alone: `second_run.py OUTPUT`, with what the first run of pytest printed.

What passes now is printed as flaky, with its first failure above; the next change mends it. More than three failures
are no accident. The last line is that of pytest for both runs together.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

MOST = 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(output: Path) -> int:
    """Return the exit status."""
    closings = re.findall(r"^.*\b\d+ passed.* in [\d.]+s.*$", output.read_text(errors="replace"), re.MULTILINE)
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.is_file() else []
    if not closings or not 0 < len(failed) <= MOST:
        print(*closings[-1:] or ["pytest did not come to its end"])
        return 1
    print(f"{len(failed)} failed; once more, alone:", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "DURATIONS"}  # those of all tests
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed]
    if subprocess.run(command, check=False, env=environment).returncode:
        return 1
    for name in failed:
        print(f"flaky: {name} passes alone; its failure stands above, and the next change mends it")
    before, _, seconds = closings[-1].rpartition(" in ")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", before)}
    num_flaky = sum(counts.pop(word, 0) for word in ("failed", "error", "errors"))
    counts["passed"] += num_flaky
    print(", ".join(f"{number} {word}" for word, number in counts.items()), "in", seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
