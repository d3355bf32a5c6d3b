"""How fast the page of a large run opens and moves: `python benchmarks/page.py [--steps 1000] [--rollouts 512]`.

Writes a run with the writers of real runs, opens its page in Chromium (apt-get install chromium), and prints seconds
until the page is drawn, and from a key to the rollouts of the next step, median and worst of 50.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))

from browser import Browser
from planted_runs import planted_run

from rallypoint.page import RunReader, write_report
from rallypoint.page.app import PageServer

_SCRUB = """
(async () => {
  const found = [];
  const slider = document.querySelector("#slider");
  for (let at = 1; at <= 50; at += 1) {
    const began = performance.now();
    slider.value = String(Math.floor((Number(slider.max) * ((at * 37) % 50)) / 50));
    slider.dispatchEvent(new Event("input"));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    found.push([performance.now() - began]);
    const step = document.querySelector("#step b").textContent.replace(",", "");
    while (!document.querySelector(`.rollout-detail[data-step="${step}"]`) && performance.now() - began < 5000)
      await new Promise((done) => setTimeout(done, 4));
    found.at(-1).push(performance.now() - began);
  }
  return found;
})()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=512)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        path = planted_run(folder, num_steps=asked.steps, prompts=asked.rollouts // 8, group=8, last="finished")
        print(f"wrote {asked.steps} steps of {asked.rollouts} rollouts in {time.perf_counter() - began:.0f} s")
        began = time.perf_counter()
        run = RunReader(path)
        run.now()
        read_s, size = time.perf_counter() - began, (path / "journal.jsonl").stat().st_size
        print(f"journal of {size / 1e6:.0f} MB read in {read_s:.2f} s")
        began = time.perf_counter()
        write_report([run], folder / "report.html")
        size = (folder / "report.html").stat().st_size
        print(f"report.html of {size / 1e6:.1f} MB written in {time.perf_counter() - began:.1f} s")
        (folder / "chromium").mkdir()
        with PageServer([RunReader(path)]) as server, Browser(folder / "chromium") as browser:
            browser.look()
            opened = []
            for _ in range(3):
                browser.go(server.url)
                opened.append(int(browser.evaluate("document.documentElement.dataset.drawn")) / 1000)
            print(f"opened in {', '.join(f'{seconds:.2f}' for seconds in opened)} s")
            times = browser.evaluate(_SCRUB)
            for what, at in (("charts drawn", 0), ("rollouts shown", 1)):
                each = [one[at] for one in times]
                print(f"a step: {what} after {statistics.median(each):.0f} ms, at worst {max(each):.0f} ms")


if __name__ == "__main__":
    main()
