"""`report.html`: the page of a run in one file, which opens without a server.

Owns: which panels and rollouts are in it, and that it stays below its size. Must not know: what a panel shows.

The modules of the page become one script, in the order of their imports; the data stand in a block that no browser
runs. A policy by digest lets nothing else run, and nothing is loaded.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rallypoint.errors import RallyError
from rallypoint.page.answers import PANELS, STATIC, answer, to_json
from rallypoint.page.run_reader import RunReader
from rallypoint.run.rollouts import rollout_files

REPORT = "report.html"
"""Name of the file in the folder of a run that has ended."""
MAX_BYTES = 5 * 10**6
_MODULES = ("dom.js", "source.js", "charts.js", "rollouts.js", "panels.js", "page.js")
_MOST_POINTS = 1000
_ROWS, _MOST_STEPS = 48, 24
_WHOLE = 6
"""Rollouts of a step that are in the file token by token."""


def write_report(runs: Sequence[RunReader], file: Path) -> str:
    """Write the page of runs into one file, whole or not at all; return a line on what of the rollouts is in it."""
    data, said = _gather(runs)
    text = page_with(data)
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
    return said


def page_with(data: Mapping[str, object]) -> str:
    """Return the page with its answers in it."""
    script, style = script_text(), (STATIC / "vendor/uPlot.min.css").read_text() + (STATIC / "page.css").read_text()
    sources = " ".join(f"{kind} '{_digest(text)}';" for kind, text in (("script-src", script), ("style-src", style)))
    policy = f"default-src 'none'; {sources} img-src data:; base-uri 'none'; form-action 'none'"
    block = to_json(data).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    html = re.sub(r"\s*<link rel=\"stylesheet\"[^>]*>", "", html)
    html = re.sub(r"\s*<script type=\"module\"[^>]*></script>", "", html)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    html = html.replace('<meta charset="utf-8">', f'<meta charset="utf-8">{meta}<style>{style}</style>')
    data_block = f'<script type="application/json" id="data">{block}</script>'
    return html.replace("</body>", f'{data_block}<script type="module">{script}</script></body>')


def script_text() -> str:
    """Return the modules of the page as one script: each in a function that returns what others import of it."""
    parts = list[str]()
    for name in ("vendor/uPlot.esm.js", *_MODULES):
        text = (STATIC / name).read_text(encoding="utf-8")
        text = re.sub(r"^import [^;]*;$", "", text, flags=re.MULTILINE)
        text = text.replace("export { uPlot as default };", "")
        names = re.findall(r"^export (?:async )?(?:const|function) (\w+)", text, flags=re.MULTILINE)
        text = re.sub(r"^export ", "", text, flags=re.MULTILINE)
        given = "uPlot" if name.startswith("vendor/") else ", ".join(names)
        parts.append(f"const {{ {given} }} = (() => {{\n{text}\nreturn {{ {given} }};\n}})();")
    return "\n".join(parts).replace("</script", "<\\/script")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _gather(runs: Sequence[RunReader]) -> tuple[dict[str, Any], str]:
    """Return the answers to what the page will ask, as many rollouts among them as there is room for."""
    found: dict[str, Any] = {"runs": answer(runs, "runs", {})}

    def ask(name: str, **asked: object) -> int:
        """Add an answer; return its size."""
        words = {key: str(value) for key, value in sorted(asked.items())}
        key = f"{name}?{urlencode(words)}"
        try:
            found[key] = answer(runs, name, words)
        except (RallyError, OSError, ValueError, KeyError, TypeError) as error:
            found[key] = {"error": str(error)}
        return len(to_json(found[key]).encode())

    size = len(script_text()) + 40_000
    for run in runs:
        for name in PANELS:
            if name in {"summary", "spread", "health", "troubles", "time", "broke", "batch", "provenance"}:
                size += ask(name, run=run.name)
        size += ask("series", run=run.name, points=_MOST_POINTS)
        if run is not runs[0]:
            size += ask("compare", run=runs[0].name, **{"with": run.name})
    kept: dict[str, list[int]] = {run.name: [] for run in runs}
    for run, step in _in_turn(runs):
        key = f"rollouts?{urlencode({'run': run.name, 'step': step})}"
        more = ask("rollouts", run=run.name, step=step, limit=_ROWS)
        found[key] = found.pop(f"rollouts?{urlencode({'limit': _ROWS, 'run': run.name, 'step': step})}")
        places = [row["place"] for row in found[key].get("rows", ())]
        more += ask("timeline", run=run.name, step=step)
        for place in places[:: max(1, len(places) // _WHOLE)][:_WHOLE]:
            more += ask("rollout", run=run.name, step=step, place=place)
        if size + more > MAX_BYTES * 0.95:
            _forget(found, run.name, step)
            break
        size += more
        kept[run.name].append(step)
    said = {
        run.name: f"rollouts of {len(kept[run.name])} of {len(rollout_files(run.folder.path))} steps" for run in runs
    }
    found["report"] = {"steps": {name: sorted(steps) for name, steps in kept.items()}, "said": said}
    return found, "; ".join(f"{name}: {text}" for name, text in said.items())


def _in_turn(runs: Sequence[RunReader]) -> Iterator[tuple[RunReader, int]]:
    """Yield steps of each run: the last, the first, those whose health is worst, and some between."""
    for run in runs:
        steps = list(rollout_files(run.folder.path))
        sick = [step for step in steps if any(one.level == "bad" for one in run.findings.get(step, ()))]
        between = steps[:: max(1, len(steps) // _MOST_STEPS)]
        chosen = dict.fromkeys((*steps[-1:], *steps[:1], *sick[:2], *sick[-1:], *between))
        yield from ((run, step) for step in list(chosen)[:_MOST_STEPS])


def _forget(found: dict[str, Any], run: str, step: int) -> None:
    words = f"{urlencode({'run': run})}&{urlencode({'step': step})}"
    for key in [key for key in found if key.endswith(words)]:
        del found[key]
