"""Rollouts on a terminal, as files have them: the best and the worst of a step, or one as it is played.

Their texts are the model's and the data's: they are cleaned before they reach a terminal.
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
from rallypoint.observability.numbers import counted, finite_mean

MAX_LINES = 12
"""Lines of each text, if not all are wanted."""
_FIRST_TURNS, _LAST_TURNS = 6, 2
"""Turns of a rollout that are printed then."""

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
    console.print(_heading(rows))
    print_chosen(console, chosen, max_lines=max_lines)


def print_chosen(console: Console, chosen: Mapping[str, Sequence[Row]], *, max_lines: int | None = MAX_LINES) -> None:
    """Print rollouts under their titles; see `print_rollouts`."""
    width = min(console.width, _WIDEST)
    for title, some in chosen.items():
        for number, row in enumerate(some, 1):
            console.print()
            console.print(Rule(_title(f"{title} {number}", row), align="left", style=PALETTE["frame"]), width=width)
            console.print(Group(*_body(row, width, max_lines)))
    console.print()


def print_turn(console: Console, number: int, turn: Row) -> None:
    """Print what was said in a turn, by the columns of docs/tracking.md."""
    console.print(Group(*_turn(number, turn, min(console.width, _WIDEST) - _LABEL_CELLS, None)))


def print_outcome(console: Console, row: Row) -> None:
    """Print all of a rollout but for what was said in it."""
    width = min(console.width, _WIDEST)
    cells = width - _LABEL_CELLS
    console.print(Rule(_title("end", row), align="left", style=PALETTE["frame"]), width=width)
    for number, turn in enumerate(row["turns"] or (), 1):
        console.print(Group(*_labelled(f"turn {number}", wrap(_turn_tokens(row, turn), cells), "dim")))
    console.print(Group(*_outcome(row, cells, MAX_LINES)))


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
    cells = width - _LABEL_CELLS
    if row.get("turns"):  # which files of older versions lack
        yield from _conversation(row, cells, max_lines)
    else:
        yield from _labelled("prompt", _lines(row["prompt"], cells, max_lines))
        yield from _labelled("response", _lines(row["response"], cells, max_lines))
    yield from _outcome(row, cells, max_lines)


def _outcome(row: Row, cells: int, max_lines: int | None) -> Iterable[Text]:
    yield from _labelled("truth", _lines(row["ground_truth"], cells, max_lines))
    if row["failure"] is not None:
        yield from _labelled("failure", _lines(row["failure"], cells, max_lines), PALETTE["wrong"])
    numbers = {**(row["reward_parts"] or {}), **(row["reward_extras"] or {})}
    if numbers:
        yield from _labelled("rewards", wrap(_named(numbers), cells))
    if counted_by_episode := _counted(row):
        yield from _labelled("metrics", wrap(counted_by_episode, cells))
    yield from _labelled("tokens", wrap(_tokens(row), cells), "dim")


def _conversation(row: Row, cells: int, max_lines: int | None) -> Iterable[Text]:
    """Print what was said, turn by turn; turns in the middle of many are left out, and that is said."""
    turns: Sequence[Row] = row["turns"]
    left_out = range(0) if max_lines is None else range(_FIRST_TURNS, len(turns) - _LAST_TURNS)
    for number, turn in enumerate(turns):
        if number in left_out:
            if number == left_out.start:
                yield from _labelled("", [f"... {counted(len(left_out), 'more turn')} (--full)"])
            continue
        yield from _turn(number, turn, cells, max_lines)
        yield from _labelled("", wrap(_turn_tokens(row, turn), cells), "dim")


def _turn(number: int, turn: Row, cells: int, max_lines: int | None) -> Iterable[Text]:
    if turn["parent"] != number - 1:
        where = "begins anew" if turn["parent"] < 0 else f"goes on after turn {turn['parent'] + 1}"
        yield from _labelled("", [f"turn {number + 1} {where}:"], "dim")
    for message in turn["said"]:
        yield from _labelled(clean(message["role"]) or "context", _lines(message["text"], cells, max_lines))
    yield from _labelled(f"policy {number + 1}", _lines(turn["response"], cells, max_lines), "bold")


def _turn_tokens(row: Row, turn: Row) -> str:
    """Say how long a response is, how likely it was, what it got, and at which limit it was cut off."""
    begin = turn["start"] - len(row["prompt_ids"])
    said = slice(begin, begin + turn["length"])
    if not turn["length"]:
        return "no token"
    parts = [counted(turn["length"], "token"), _perplexity(row["rollout_logprobs"][said])]
    if row["token_rewards"] is not None:
        parts.append(f"reward {math.fsum(row['token_rewards'][said]):.4g}")
    return ", ".join([*parts, *([f"cut off ({turn['limit']} limit)"] if turn["limit"] else [])])


def _counted(row: Row) -> str:
    """Print what an episode counted, and what it took; nothing of rollouts without one."""
    parts = [_named(row["metrics"])] if row.get("metrics") else []
    if row.get("num_tool_calls"):
        parts.append(f"{counted(row['num_tool_calls'], 'tool call')}, {row['num_tool_errors']} of them failed")
    if row.get("environment_s"):
        parts.append(f"{row['environment_s']:.3g} s in the environment")
    return ", ".join(parts)


def _named(numbers: Mapping[str, float | None]) -> str:
    return ", ".join(f"{clean(name)} {'none' if value is None else f'{value:.4g}'}" for name, value in numbers.items())


def _perplexity(logprobs: Sequence[float]) -> str:
    return f"perplexity {math.exp(min(-finite_mean(logprobs), 700.0)):.3g}"


def _tokens(row: Row) -> str:
    """Say in words how long a response is, how it ended, how likely it was, and what was learned from it."""
    sampled = row["loss_mask"]
    logprobs = [value for value, mine in zip(row["rollout_logprobs"], sampled, strict=True) if mine]
    ended = "cut off at the limit" if row["finish_reason"] == "length" else "ended by itself"
    parts = [f"{len(row['prompt_ids'])} + {sum(sampled)}, {ended}"]
    breaks = sum(not sampled[place - 1] for place in range(1, len(sampled)) if sampled[place])
    if (turns := len(row.get("turns") or ()) or breaks + 1) > 1:
        parts.append(f"{turns} turns")
    if starts := sum(row.get("sequence_starts") or ()):
        parts.append(f"{starts + 1} sequences")
    if logprobs:
        parts.append(_perplexity(logprobs))
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
