"""Rollouts and lists of runs are printed for people, whatever a model has written."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from rallypoint.cli.rollouts import choose, print_rollouts
from rallypoint.cli.runs import print_runs
from rallypoint.run.overview import Overview


def row(score, response="four", **more):
    return {
        "step": 40,
        "prompt_index": 317,
        "sample_index": 2,
        "name": "train.parquet:17",
        "prompt": "2 + 2 = ?",
        "response": response,
        "ground_truth": "4",
        "score": score,
        "reward_parts": {"right": 1.0, "short": None},
        "reward_extras": {"chars": 4.0},
        "failure": None if score is not None else "timeout: took longer than 5 s",
        "finish_reason": "stop",
        "version": 39,
        "prompt_ids": [5, 6],
        "response_ids": [7, 8, 9],
        "loss_mask": [True, False, True],
        "rollout_logprobs": [-0.5, 0.0, -1.5],
        "advantages": [0.25, 0.0, 0.25],
        **more,
    }


def printed(rows, *, max_lines=None, **which) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    chosen = choose(rows, **{"best": 0, "worst": 0, "failed": 0, **which})
    print_rollouts(console, rows, chosen, max_lines=max_lines)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_rollout_is_printed_with_its_texts_rewards_and_tokens():
    text = printed([row(1.0), row(None)], best=1, failed=1)
    assert "step 40  2 rollouts of 1 prompts  score 1.000 (from 1.000 to 1.000)  1 without a score" in text
    assert "best 1  score 1.000  train.parquet:17 prompt 317, sample 2 " in text
    assert "prompt       2 + 2 = ?" in text
    assert "response     four" in text
    assert "truth        4" in text
    assert "rewards      right 1, short none, chars 4" in text
    assert "2 + 2, ended by itself, 2 turns, perplexity 2.72, advantage +0.250, version 39" in text
    assert "failure      timeout: took longer than 5 s" in text


def said(parent, start, response, *messages, length=1, limit=None):
    """A turn as files have it."""
    told = [{"role": role, "text": text} for role, text in messages]
    return {
        "parent": parent, "said": told, "num_added": 1, "start": start, "length": length, "response": response,
        "limit": limit,
    }  # fmt: skip


def test_a_rollout_of_several_turns_is_printed_as_a_conversation():
    turns = [
        said(-1, 2, "3", ("system", "Add."), ("user", "2 + 2 = ?")),
        said(0, 4, "4", ("tool", "No.\x1b[2J [bold]"), limit="row"),
        said(0, 5, "", ("", "<|user|>Again."), length=0),
        said(-1, 3, "5", ("user", "Anew.")),
    ]
    counted = {"turns": turns, "metrics": {"moves": 3.0}, "num_tool_calls": 2, "num_tool_errors": 1}
    counted |= {"environment_s": 1.5, "token_rewards": [0.25, 0.0, 0.75]}
    lines = printed([row(1.0, **counted)], best=1).splitlines()
    assert [line.rstrip() for line in lines[3:-1]] == [
        "system       Add.",
        "user         2 + 2 = ?",
        "policy 1     3",
        "             1 token, perplexity 1.65, reward 0.25",
        "tool         No. [bold]",
        "policy 2     4",
        "             1 token, perplexity 4.48, reward 0.75, cut off (row limit)",
        "             turn 3 goes on after turn 1:",
        "context      <|user|>Again.",
        "policy 3",
        "             no token",
        "             turn 4 begins anew:",
        "user         Anew.",
        "policy 4     5",
        "             1 token, perplexity 1, reward 0",
        "truth        4",
        "rewards      right 1, short none, chars 4",
        "metrics      moves 3, 2 tool calls, 1 of them failed, 1.5 s in the environment",
        "tokens       2 + 2, ended by itself, 4 turns, perplexity 2.72, advantage +0.250, version 39",
    ]


def test_of_many_turns_those_in_the_middle_are_left_out_unless_all_are_wanted():
    turns = [said(number - 1, 2, f"move {number}", ("user", "Go on.")) for number in range(20)]
    short = printed([row(1.0, turns=turns, token_rewards=None)], best=1, max_lines=12)
    assert [number for number in range(20) if f"move {number}\n" in short.replace(" \n", "\n")] == [*range(6), 18, 19]
    assert "... 12 more turns (--full)" in short
    assert "more turns" not in printed([row(1.0, turns=turns, token_rewards=None)], best=1)


def test_a_long_response_is_cut_in_its_middle_unless_all_is_wanted():
    long = "\n".join(f"line {number}" for number in range(100))
    short = printed([row(1.0, long)], best=1, max_lines=6)
    assert "line 3" in short
    assert "... 95 more lines (--full)" in short
    assert "line 99" in short
    assert "line 50" not in short
    assert "line 50" in printed([row(1.0, long)], best=1)


def test_nothing_that_a_model_writes_steers_the_terminal():
    text = printed([row(0.0, "a\x1b[2Jb\x1b]0;title\x07[bold]c[/]\nd")], worst=1)
    assert "\x1b" not in text
    assert "ab[bold]c[/]" in text


def test_a_list_of_runs_has_a_line_for_each_and_the_reasons_of_failures():
    runs = [
        Overview(
            path=Path("runs/new"),
            recipe="grpo",
            state="running",
            step=40,
            num_steps=120,
            scores=[(0, 0.1), (20, 0.9), (40, 0.8)],
            is_validated=True,
            changed=1000.0,
        ),
        Overview(path=Path("runs/old"), recipe="ppo", state="failed", why="no [room]", num_steps=10, changed=0.0),
        Overview(path=Path("runs/bare"), recipe="ppo", state="killed", scores=[(1, 0.25)], changed=0.0),
    ]
    console = Console(file=io.StringIO(), width=100, highlight=False)
    print_runs(console, runs, now=1090.0)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[2].split() == ["new", "grpo", "▶", "running", "40/120", "0.800", "0.900", "@20", "▁█▇", "1", "min"]
    assert lines[3].split() == ["old", "ppo", "✖", "failed", "0/10", "-", "-", "18", "min"]
    assert "0.250*" in lines[4]
    assert lines[-2:] == ["* mean reward of a step: the run has no validation", "old: no [room]"]


@pytest.mark.parametrize("num_letters", [5, 40, 64, 120])
def test_a_list_of_runs_never_cuts_a_name_and_fits_a_terminal_without_its_last_columns(num_letters):
    name = "a" * num_letters
    runs = [
        Overview(
            path=Path(f"runs/{name}"), recipe="digits-grpo", state="finished", step=400, num_steps=1200,
            scores=[(step, 0.5) for step in range(0, 400, 20)], is_validated=True, changed=0.0,
        )
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_runs(console, runs, now=90.0)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[2].split()[0] == name
    assert ("finished" in lines[2]) == (num_letters < 80)
    assert max(map(len, lines)) <= max(80, num_letters + 2)
