"""Rollouts of a step on a screen: the best, the worst, those without a score; each with its texts and numbers.

The texts are the model's and the data's: they are cleaned before they reach a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.rule import Rule
from rich.text import Text

from rallypoint.display.text import clean, wrap
from rallypoint.display.theme import PALETTE
from rallypoint.observability.numbers import finite_mean

Row = Mapping[str, Any]
"""A rollout by the columns of docs/tracking.md."""

_LABEL_CELLS, _WIDEST = 13, 120
_MAX_CHARS = 20_000
"""Characters of one line of a text that are looked at."""


def choose(rows: Sequence[Row], *, best: int, worst: int, failed: int) -> dict[str, list[Row]]:
    """Return the rollouts to show, under a title each; none twice, and of equal scores the first.

    >>> rows = [{"score": score} for score in (0.0, 1.0, None, 0.5)]
    >>> choose(rows, best=1, worst=9, failed=1)
    {'best': [{'score': 1.0}], 'worst': [{'score': 0.0}, {'score': 0.5}], 'without a score': [{'score': None}]}
    """
    scored = sorted((row for row in rows if row["score"] is not None), key=lambda row: -row["score"])
    found = {
        "best": scored[:best],
        "worst": sorted(scored[best:], key=lambda row: row["score"])[:worst],
        "without a score": [row for row in rows if row["score"] is None][:failed],
    }
    return {title: chosen for title, chosen in found.items() if chosen}


def print_rollouts(
    console: Console, rows: Sequence[Row], chosen: Mapping[str, Sequence[Row]], *, max_lines: int | None
) -> None:
    """Print a line on all rollouts of a step, and the chosen ones.

    Args:
        console: to print to.
        rows: all of the step.
        chosen: some of them, by title.
        max_lines: lines of each text; None for all.
    """
    width = min(console.width, _WIDEST)
    console.print(_heading(rows))
    for title, some in chosen.items():
        for number, row in enumerate(some, 1):
            console.print()
            console.print(Rule(_title(f"{title} {number}", row), align="left", style=PALETTE["frame"]), width=width)
            console.print(Group(*_body(row, width, max_lines)))
    console.print()


def _heading(rows: Sequence[Row]) -> Text:
    scores = [row["score"] for row in rows if row["score"] is not None]
    prompts = len({row["prompt_index"] for row in rows})
    lengths = [sum(row["loss_mask"]) for row in rows]
    text = Text(f"step {rows[0]['step']}", "bold")
    text.append(f"  {len(rows)} rollouts of {prompts} prompts", "not bold")
    if scores:
        mean = finite_mean(scores)
        text.append(f"  score {mean:.3f}", PALETTE["reward"])
        text.append(f" (from {min(scores):.3f} to {max(scores):.3f})", "not bold dim")
    if without := len(rows) - len(scores):
        text.append(f"  {without} without a score", PALETTE["wrong"])
    cut = sum(row["finish_reason"] == "length" for row in rows)
    text.append(f"  {sum(lengths) / len(rows):.0f} tokens, {cut / len(rows):.0%} cut off", "not bold dim")
    return text


def _title(title: str, row: Row) -> Text:
    score = "no score" if row["score"] is None else f"score {row['score']:.3f}"
    return Text.assemble(
        (title, "dim"),
        "  ",
        (score, f"bold {PALETTE['wrong' if row['score'] is None else 'reward']}"),
        f"  {clean(row['name'])} ",
        (f"prompt {row['prompt_index']}, sample {row['sample_index']} ", "dim"),
    )


def _body(row: Row, width: int, max_lines: int | None) -> Iterable[Text]:
    for label in ("prompt", "response", "ground_truth"):
        yield from _labelled(label.replace("ground_", ""), _lines(row[label], width - _LABEL_CELLS, max_lines))
    if row["failure"] is not None:
        yield from _labelled("failure", _lines(row["failure"], width - _LABEL_CELLS, max_lines), PALETTE["wrong"])
    numbers = {**(row["reward_parts"] or {}), **(row["reward_extras"] or {})}
    if numbers:
        named = ((clean(name), "none" if value is None else f"{value:.4g}") for name, value in numbers.items())
        said = ", ".join(f"{name} {value}" for name, value in named)
        yield from _labelled("rewards", wrap(said, width - _LABEL_CELLS))
    yield from _labelled("tokens", wrap(_tokens(row), width - _LABEL_CELLS), "dim")


def _tokens(row: Row) -> str:
    """Say in words how long a response is, how it ended, how likely it was, and what was learned from it."""
    sampled = row["loss_mask"]
    logprobs = [value for value, mine in zip(row["rollout_logprobs"], sampled, strict=True) if mine]
    ended = "cut off at the limit" if row["finish_reason"] == "length" else "ended by itself"
    parts = [f"{len(row['prompt_ids'])} + {sum(sampled)}, {ended}"]
    if turns := sum(not sampled[place - 1] for place in range(1, len(sampled)) if sampled[place]):
        parts.append(f"{turns + 1} turns")
    if logprobs:
        parts.append(f"perplexity {math.exp(min(-finite_mean(logprobs), 700.0)):.3g}")
    if row["advantages"]:
        learned = [value for value, mine in zip(row["advantages"], sampled, strict=True) if mine]
        parts.append(f"advantage {finite_mean(learned):+.3f}")
    return ", ".join([*parts, f"version {row['version']}"])


def _lines(text: str, width: int, max_lines: int | None) -> list[str]:
    """Break a text into lines of a terminal; the middle of a long one is left out, and that is said."""
    lines = [part for line in text.strip("\n").split("\n") for part in wrap(clean(line, _MAX_CHARS), width) or [""]]
    if max_lines is None or len(lines) <= max_lines:
        return lines
    head = max(1, max_lines * 2 // 3)
    tail = max(max_lines - head - 1, 0)
    left_out = f"... {len(lines) - head - tail} more lines (--full)"
    return [*lines[:head], left_out, *lines[len(lines) - tail :]]


def _labelled(label: str, lines: Sequence[str], style: str = "") -> Iterable[Text]:
    for number, line in enumerate(lines or [""]):
        text = Text(f"{label if number == 0 else '':{_LABEL_CELLS}}", PALETTE["quiet"])
        yield text.append(line, style or "not dim")
