"""`report.html`: the page of a run in one file, which opens without a server.

Owns: which panels and rollouts are in it, and that it stays below its size. Must not know: what a panel shows.

The modules of the page become one script, in the order of their imports; the data stand in a block that no browser
runs. A policy by digest lets nothing else run, and nothing is loaded.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.page.answers import PANELS, STATIC, answer_or_why, to_json
from rallypoint.page.rollout_tables import FILTERS
from rallypoint.page.run_reader import RunReader
from rallypoint.run.rollouts import rollout_files

MAX_BYTES = 5 * 10**6
_MODULES = ("dom.js", "source.js", "charts.js", "rollouts.js", "panels.js", "page.js")
_MOST_POINTS = 1000
_ROWS, _MOST_STEPS = 48, 24
_WHOLE = 8
"""Rollouts of a step that are in the file token by token."""
_OF_STEPS = {"values", "timeline", "rollouts", "group", "rollout", "prompt"}
_OF_RUNS = ("summary", "series", *(name for name in PANELS if name not in {"summary", "series", *_OF_STEPS}))


def write_report(runs: Sequence[RunReader], file: Path) -> str:
    """Write the page of runs into one file, whole or not at all; return a line on what of the rollouts is in it."""
    data, said = _Gathered(runs).all()
    text = page_with(data)
    assert len(text.encode()) <= MAX_BYTES, "what has no room is left out"
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
    return said


def page_with(data: Mapping[str, object]) -> str:
    """Return the page with its answers in it."""
    script, style = script_text(), (STATIC / "vendor/uPlot.min.css").read_text() + (STATIC / "page.css").read_text()
    sources = " ".join(f"{kind} '{_digest(text)}';" for kind, text in (("script-src", script), ("style-src", style)))
    policy = f"default-src 'none'; {sources} img-src data:; base-uri 'none'; form-action 'none'"
    block = _escaped(data)
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


def _escaped(value: object) -> str:
    """Write JSON that no browser takes for the end of the block that it stands in."""
    return to_json(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


class _Gathered:
    """The answers to what the page will ask, as many as there is room for."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs, self._found = runs, dict[str, Any]()
        self._left = MAX_BYTES - len(page_with({}).encode()) - 20_000
        self._kept: dict[str, list[int]] = {run.name: [] for run in runs}

    def all(self) -> tuple[dict[str, Any], str]:
        """Return the answers, and a line on what of the rollouts is among them."""
        self._add(self._ask("runs"))
        for name in _OF_RUNS:
            for run in self._runs:
                points = {"points": _MOST_POINTS} if name == "series" else {}
                self._add(self._ask(name, run=run.name, **points))
        for run, other in itertools.combinations(self._runs, 2):
            self._add(self._ask("compare", run=run.name, **{"with": other.name}))
        for run, step in _in_turn(self._runs):
            if self._fits(answers := self._of_step(run, step)):
                self._add(answers)
                self._kept[run.name].append(step)
        said = {
            run.name: f"rollouts of {len(self._kept[run.name])} of {len(rollout_files(run.folder.path))} steps"
            for run in self._runs
        }
        self._found["report"] = {"steps": {name: sorted(steps) for name, steps in self._kept.items()}, "said": said}
        return self._found, "; ".join(f"{name}: {text}" for name, text in said.items())

    def _ask(self, name: str, **asked: object) -> dict[str, Any]:
        """Return an answer by its question, as `source.js` asks it."""
        words = {key: str(value) for key, value in sorted(asked.items())}
        return {to_json([name, *map(list, words.items())]): answer_or_why(self._runs, name, words)}

    def _fits(self, answers: Mapping[str, Any]) -> bool:
        return len(_escaped(answers).encode()) <= self._left

    def _add(self, answers: Mapping[str, Any]) -> None:
        for key, value in answers.items():
            kept = {key: value}
            if not self._fits(kept):
                kept = {key: {"error": "this is too large for a report: rally view RUN shows it"}}
            self._left -= len(_escaped(kept).encode())
            self._found |= kept

    def _of_step(self, run: RunReader, step: int) -> dict[str, Any]:
        """Return whole groups of a step: some of each filter, the best and the worst, and then in order."""
        where = {"run": run.name, "step": step}
        ((key, table),) = self._ask("rollouts", **where, limit=512).items()
        key, rows = (
            to_json(["rollouts", *([name, str(value)] for name, value in where.items())]),
            table.get("rows", []),
        )
        scored = sorted((row for row in rows if row["score"] is not None), key=lambda row: row["score"])
        tagged = [row for name in FILTERS for row in [one for one in rows if name in one["tags"]][:1]]
        size = max(1, len([row for row in rows if row["prompt_index"] == rows[0]["prompt_index"]])) if rows else 1
        in_order = (row["prompt_index"] for row in (*tagged, *scored[:1], *scored[-1:], *rows))
        groups = set(list(dict.fromkeys(in_order))[: max(1, _ROWS // size)])
        kept = [row for row in rows if row["prompt_index"] in groups]
        found = {key: table | {"rows": kept} if rows else table}
        found |= self._ask("timeline", **where) | self._ask("values", **where)
        first = {row["prompt_index"]: row["place"] for row in reversed(kept)}
        for place in list(dict.fromkeys([*first.values(), *(row["place"] for row in kept)]))[:_WHOLE]:
            found |= self._ask("rollout", **where, place=place)
        return found


def _in_turn(runs: Sequence[RunReader]) -> Iterator[tuple[RunReader, int]]:
    """Yield steps, of all runs in turn: the last, the first, those whose health is worst, and some between.

    Of several runs those steps come first that all of them have, so that answers can be compared.
    """
    files = {run.name: list(rollout_files(run.folder.path)) for run in runs}
    both = set[int].intersection(*map(set, files.values()))
    chosen = list[list[tuple[RunReader, int]]]()
    for run in runs:
        steps, findings = files[run.name], run.now().findings
        sick = [step for step in steps if any(one.level == "bad" for one in findings.get(step, ()))]
        common = sorted(both) if len(runs) > 1 else []
        some = (*common[-1:], *common[:1], *common[:: max(1, 3 * len(common) // _MOST_STEPS)])
        between = steps[:: max(1, len(steps) // _MOST_STEPS)]
        wanted = dict.fromkeys((*some, *steps[-1:], *steps[:1], *sick[:2], *sick[-1:], *between))
        chosen.append([(run, step) for step in list(wanted)[:_MOST_STEPS]])
    for each in itertools.zip_longest(*chosen):
        yield from (one for one in each if one is not None)
