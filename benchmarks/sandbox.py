"""Programs a second in each sandbox of this machine, from two threads; each program reads a line and writes one.

python benchmarks/sandbox.py [--programs 200] [--threads 2]
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

from rallypoint.environments.sandbox.choose import local_tiers, probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    wanted = parser.parse_args()
    for tier in local_tiers():
        problem = probe(tier)
        if problem is not None:
            print(f"{type(tier).__name__:12} {problem}")
            continue
        began = time.perf_counter()
        with ThreadPoolExecutor(wanted.threads) as threads:
            found = list(
                threads.map(lambda n, run=tier.run: run("print(input())", stdin=str(n)), range(wanted.programs))
            )
        seconds = time.perf_counter() - began
        assert [ran.stdout for ran in found] == [f"{n}\n" for n in range(wanted.programs)]
        print(f"{wanted.programs / seconds:6.1f} programs/s  {tier.name}")


if __name__ == "__main__":
    main()
