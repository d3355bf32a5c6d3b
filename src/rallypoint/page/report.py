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
from rallypoint.page.run_reader import RunReader
from rallypoint.run.rollouts import rollout_files

MAX_BYTES = 5 * 10**6
_MODULES = ("dom.js", "source.js", "charts.js", "rollouts.js", "panels.js", "page.js")
_MOST_POINTS = 1000
_ROWS, _MOST_STEPS = 48, 24
_WHOLE = 8
"""Rollouts of a step that are in the file token by token."""
_TOO_LARGE = "this is too large for a report: rally view RUN shows it"
_OF_STEPS = {"values", "timeline", "rollouts", "excerpt", "group", "rollout", "prompt"}
_OF_RUNS = ("summary", "series", *(name for name in PANELS if name not in {"summary", "series", *_OF_STEPS}))


def write_report(runs: Sequence[RunReader], file: Path) -> str:
    """Write the page of runs into one file, whole or not at all; return a line on what of the rollouts is in it."""
    block, said = _Gathered(runs).all()
    text = _page_with(block)
    assert len(text.encode()) <= MAX_BYTES, "what has no room is left out"
    part = file.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
    return said


def _page_with(block: str) -> str:
    """Return the page with its answers in it, as JSON."""
    script, style = script_text(), (STATIC / "vendor/uPlot.min.css").read_text() + (STATIC / "page.css").read_text()
    sources = " ".join(f"{kind} '{_digest(text)}';" for kind, text in (("script-src", script), ("style-src", style)))
    policy = f"default-src 'none'; {sources} img-src data:; base-uri 'none'; form-action 'none'"
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
        self._runs, self._found = runs, dict[str, str]()
        """Question -> the answer, both as JSON."""
        self._left = MAX_BYTES - len(_page_with("").encode()) - 20_000
        self._kept: dict[str, list[int]] = {run.name: [] for run in runs}

    def all(self) -> tuple[str, str]:
        """Return the answers as JSON, and a line on what of the rollouts is among them."""
        self._add(self._ask("runs"))
        for name in _OF_RUNS:
            for run in self._runs:
                points = {"points": _MOST_POINTS} if name == "series" else {}
                self._add(self._ask(name, run=run.name, **points))
        for run, other in itertools.combinations(self._runs, 2):
            self._add(self._ask("compare", run=run.name, **{"with": other.name}))
        for run, step in _in_turn(self._runs):
            if self._add(self._of_step(run, step), whole=True):
                self._kept[run.name].append(step)
        said = {
            run.name: f"rollouts of {len(self._kept[run.name])} of {len(rollout_files(run.folder.path))} steps"
            for run in self._runs
        }
        steps = {name: sorted(steps) for name, steps in self._kept.items()}
        self._found[_escaped("report")] = _escaped({"steps": steps, "said": said})
        block = ",".join(f"{question}:{answer}" for question, answer in self._found.items())
        return f"{{{block}}}", "; ".join(f"{name}: {text}" for name, text in said.items())

    def _ask(self, name: str, **asked: object) -> dict[str, Any]:
        """Return an answer by its question."""
        words = {key: str(value) for key, value in asked.items()}
        return {_question(name, words): answer_or_why(self._runs, name, words)}

    def _add(self, answers: Mapping[str, Any], *, whole: bool = False) -> bool:
        """Add answers, in place of one that is too large that; or, if `whole`, none where not all have room."""
        written = {_escaped(question): _escaped(answer) for question, answer in answers.items()}
        sizes = {question: len(f"{question}:{answer},".encode()) for question, answer in written.items()}
        if whole and sum(sizes.values()) > self._left:
            return False
        for question, answer in written.items():
            is_kept = sizes[question] <= self._left
            self._found[question] = answer if is_kept else _escaped({"error": _TOO_LARGE})
            self._left -= sizes[question] if is_kept else len(question) + len(self._found[question])
        return True

    def _of_step(self, run: RunReader, step: int) -> dict[str, Any]:
        """Return whole groups of a step, its bars and its numbers, and some rollouts token by token."""
        where = {"run": run.name, "step": step}
        (table,) = self._ask("excerpt", **where, rows=_ROWS).values()
        kept = table.get("rows", [])
        found = {_question("rollouts", where): table}
        found |= self._ask("timeline", **where) | self._ask("values", **where)
        first = {row["prompt_index"]: row["place"] for row in reversed(kept)}
        for place in list(dict.fromkeys([*first.values(), *(row["place"] for row in kept)]))[:_WHOLE]:
            found |= self._ask("rollout", **where, place=place)
        return found


def _question(name: str, asked: Mapping[str, object]) -> str:
    """Return a question as `source.js` asks it."""
    return to_json([name, *([key, str(value)] for key, value in sorted(asked.items()))])


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
