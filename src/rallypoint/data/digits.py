"""Tasks with digits that a model can learn from nothing, and their reward.

Owns: the seeded generator of the shipped data sets and the rule that scores their answers. Must not
know: tokenizers, tensors, training.

>>> make_task("sort", num_digits=6).answer("493105")
'013459'
>>> make_task("sequence", num_digits=6).answer("2468")
'024680'
>>> make_task("sum", num_digits=3).answer("123+456")
'0579'
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
from pathlib import Path
from typing import Literal, get_args

DigitsTask = Literal["sort", "sequence", "sum"]

MIN_DIGITS, MAX_DIGITS = 2, 12
_SHOWN_TERMS = range(3, 9)
"""How many terms of a sequence a prompt may show."""
_SYMBOL = re.compile(r"<[a-z]+>|.", re.DOTALL)
"""One token of the digits tokenizer, as text: a character, or the name of a role (`<user>`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A numbered set of distinct prompts, each with its one right answer."""

    name: DigitsTask
    num_digits: int

    @property
    def num_prompts(self) -> int:
        """How many distinct prompts exist."""
        if self.name == "sequence":
            return len(_SHOWN_TERMS) * 100
        return 10 ** (self.num_digits if self.name == "sort" else 2 * self.num_digits)

    def prompt(self, number: int) -> str:
        """Return the prompt with this number, 0 to num_prompts - 1; no two are the same."""
        if self.name == "sequence":
            shown, start_and_difference = divmod(number, 100)
            return _terms(*divmod(start_and_difference, 10), _SHOWN_TERMS[shown])
        if self.name == "sort":
            return f"{number:0{self.num_digits}d}"
        left, right = divmod(number, 10**self.num_digits)
        return f"{left:0{self.num_digits}d}+{right:0{self.num_digits}d}"

    def answer(self, prompt: str) -> str:
        """Return the answer, which has the same length for all the prompts of a task."""
        if self.name == "sort":
            return "".join(sorted(prompt))
        if self.name == "sum":
            left, right = prompt.split("+")
            return f"{int(left) + int(right):0{self.num_digits + 1}d}"
        difference = int(prompt[-1]) - int(prompt[-2])
        return _terms(int(prompt[-1]) + difference, difference, self.num_digits)


def make_task(name: DigitsTask, *, num_digits: int) -> Task:
    """Return one of the tasks.

    Args:
        name: `sort`: put the digits in order. `sequence`: continue an arithmetic sequence modulo 10, of which
            3 to 8 terms are shown. `sum`: add two numbers.
        num_digits: length of the answer; for `sum` the length of each number (leading zeros are written), and
            the answer has one digit more, so that the carry always has its place.

    Raises:
        ValueError: unknown task, or num_digits out of range.
    """
    if name not in get_args(DigitsTask):
        raise ValueError(f"task: expected one of {', '.join(get_args(DigitsTask))}, found {name!r}")
    if not MIN_DIGITS <= num_digits <= MAX_DIGITS:
        raise ValueError(f"num_digits: expected {MIN_DIGITS} to {MAX_DIGITS}, found {num_digits}")
    return Task(name, num_digits)


def make_digits(
    folder: str | Path,
    *,
    task: DigitsTask,
    num_digits: int,
    num_train_prompts: int,
    num_validation_prompts: int,
    seed: int = 0,
) -> tuple[Path, Path]:
    """Write train.parquet and validation.parquet, and return their paths.

    The same arguments give the same rows on any machine. No validation prompt occurs in training or twice.
    Training prompts are distinct where enough of them exist; otherwise each occurs equally often (give or
    take one). A file appears under its name only when it is complete.

    Raises:
        ValueError: an argument is out of range, or the task has too few distinct prompts.
    """
    kind = make_task(task, num_digits=num_digits)
    for name, count in (("num_train_prompts", num_train_prompts), ("num_validation_prompts", num_validation_prompts)):
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, found {count}")
    if num_validation_prompts >= kind.num_prompts:
        raise ValueError(
            f"num_validation_prompts: found {num_validation_prompts}, but {task} with num_digits={num_digits} has "
            f"only {kind.num_prompts} distinct prompts, of which at least one must be left for training"
        )
    num_distinct = min(num_train_prompts + num_validation_prompts, kind.num_prompts)
    # The seed is text, so that neighbouring tasks and seeds have nothing in common.
    rng = random.Random(f"rallypoint/digits-{task}/{num_digits}/{seed}")
    prompts = [kind.prompt(number) for number in _draw_distinct(rng, kind.num_prompts, num_distinct)]
    validation, rest = prompts[:num_validation_prompts], prompts[num_validation_prompts:]
    training = [rest[index % len(rest)] for index in range(num_train_prompts)]
    return (
        _write(Path(folder) / "train.parquet", kind, training),
        _write(Path(folder) / "validation.parquet", kind, validation),
    )


def score_digits(
    data_source: str,  # noqa: ARG001 - the signature of every reward function
    solution_str: str,
    ground_truth: str,
    extra_info: object = None,  # noqa: ARG001
) -> list[float]:
    """Score every token of an answer: +1/n for a right one, 0 for a wrong one, -1/n for one too many.

    n is the length of the right answer. The sum is the share of right digits less the superfluous ones: 1
    for the right answer and nothing else. The end-of-sequence token is not part of `solution_str`; a role
    token (`<user>`) that the policy sampled counts as one token.

    Why a score for every token, and not one for the answer: a random policy of 20 tokens gets all six digits
    right once in 64 million answers, and a reward that never arrives teaches nothing. A single digit is right
    once in 20, at once, and its reward arrives at the very token that earned it, so that the advantage of the
    token is not drowned by the luck of the five others. Learning then needs no model that can already do the
    task a little.

    >>> score_digits("", "013459", "013459")[:2], sum(score_digits("", "0134", "0134"))
    ([0.16666666666666666, 0.16666666666666666], 1.0)
    >>> score_digits("", "0734<user>", "0134")
    [0.25, 0.0, 0.25, 0.25, -0.25]
    """
    share = 1.0 / len(ground_truth)
    symbols: list[str] = _SYMBOL.findall(solution_str)
    right = [share if said == true else 0.0 for said, true in zip(symbols, ground_truth, strict=False)]
    return right + [-share] * (len(symbols) - len(right))


def _terms(start: int, difference: int, count: int) -> str:
    return "".join(str((start + difference * term) % 10) for term in range(count))


def _draw_distinct(rng: random.Random, size: int, count: int) -> list[int]:
    """Draw distinct numbers below size: the first `count` places of a Fisher-Yates shuffle.

    Only the places that were swapped are stored, so that a size of 10**24 costs nothing.

    >>> sorted(_draw_distinct(random.Random(0), 4, 4))
    [0, 1, 2, 3]
    """
    drawn: list[int] = []
    moved: dict[int, int] = {}
    for place in range(count):
        other = rng.randrange(place, size)
        drawn.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return drawn


def _write(path: Path, task: Task, prompts: list[str]) -> Path:
    import pyarrow as pa  # here, so that scoring needs no pyarrow
    import pyarrow.parquet as pq

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    reward_model = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
    extra_info = pa.struct([("split", pa.string()), ("index", pa.int64()), ("num_digits", pa.int64())])
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(message)),
            ("ability", pa.string()),
            ("reward_model", reward_model),
            ("extra_info", extra_info),
        ]
    )
    rows = [
        {
            "data_source": f"rallypoint/digits-{task.name}",
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "digits",
            "reward_model": {"style": "rule", "ground_truth": task.answer(prompt)},
            "extra_info": {"split": path.stem, "index": index, "num_digits": task.num_digits},
        }
        for index, prompt in enumerate(prompts)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
