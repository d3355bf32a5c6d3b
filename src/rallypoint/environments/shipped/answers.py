"""Rewards that find the answer in a response and compare it with the ground truth: 1 if it is right, else 0.

Invariant: a response without an answer that can be read is wrong, and is never an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, DecimalException
from typing import Any

_NUMBER = re.compile(r"[-+]?\$?(?:\d(?:[\d,]*\d)?(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+|/\d+)?")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?![\d,]).*")
_MINUS = str.maketrans("\u2212\uff0d", "--")


def exact(
    data_source: str,  # noqa: ARG001 - every reward is given the same four
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    tag: str | None = None,
    ignore_case: bool = False,
) -> float:
    """Compare the whole response with the truth, or with any of a list of them; white space at the ends is ignored.

    Args:
        data_source: ignored.
        solution_str: the response.
        ground_truth: text or number, or a list of those that are right.
        extra_info: ignored.
        tag: compares what the last `<tag>...</tag>` holds instead; without one the response is wrong.
        ignore_case: whether "Yes" is "yes".
    """
    found = solution_str.strip() if tag is None else tagged(solution_str, tag)
    truths = [str(one).strip() for one in (ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth])]
    if found is None:
        return 0.0
    return float(found.casefold() in [one.casefold() for one in truths] if ignore_case else found in truths)


def gsm8k(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    flexible: bool = False,
) -> float:
    """Compare the number after the last `####` with that of the truth, as numbers.

    Args:
        data_source: ignored.
        solution_str: the response.
        ground_truth: a number, or the worked answer of GSM8K's file, which ends with `#### 72`.
        extra_info: ignored.
        flexible: takes the last number of a response that has no `####`.
    """
    truth = _number_in(str(ground_truth).rpartition("####")[2])
    if truth is None:
        raise ValueError(f"gsm8k: the ground truth has no number: {str(ground_truth)[-100:]!r}")
    _, mark, answer = solution_str.rpartition("####")
    if mark:
        found = _number_in(answer)
    else:
        numbers = _NUMBER.findall(solution_str[-2000:]) if flexible else []
        found = _number_in(numbers[-1]) if numbers else None
    return float(found is not None and found == truth)


def math(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
) -> float:
    r"""Compare the answer in `\boxed{}`, or the last expression, with the truth as mathematics (math-verify).

    Args:
        data_source: ignored.
        solution_str: the response; only its end is read.
        ground_truth: LaTeX such as `\frac{1}{2}`, a number, a solution with `\boxed{}`, or a worked answer of GSM8K's
            file, which ends with `#### 72`.
        extra_info: ignored.
    """
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    truth = str(ground_truth).rpartition("####")[2].strip()
    gold = parse(_last_box(truth) if "$" in truth or "\\boxed" in truth else f"\\boxed{{{truth}}}")
    if not gold:
        raise ValueError(f"math: the ground truth is no mathematics: {truth[:100]!r}")
    return float(bool(verify(gold, parse(_last_box(solution_str[-8000:])))))


def _last_box(text: str) -> str:
    r"""Return a text from its last `\boxed` on: several answers would be read as a set of them."""
    return text[max(text.rfind("\\boxed"), 0) :]


_MARKED = r"[(\[]\s*(?P<{0}_marked>[A-Za-z])\s*[)\]]"
_ALONE = (
    r"(?P<{0}_plain>[B-HJ-Z])(?![\w'’])"
    r"|(?P<{0}_word>[AIa-z])(?=\s*(?:[.,;:!?)\n]|$|(?:because|since|as|for|due|and|or|but|which|is|by)\b))"
)
"""A letter that may be a word, as in "a whale" and "I think", counts only where the sentence ends or begins anew."""
_SAID = (
    r"\s*(?:not\s+[(\[]?[A-Za-z][)\]]?,?\s+but\s+)?(?:(?i:therefore|thus|then|clearly|indeed|probably|likely)\s+)?"
    r"(?:(?i:the\s+)?(?i:option|choice|letter|answer)\s+)?"
)


def _letter(name: str) -> str:
    return f"(?:{_MARKED}|{_ALONE})".format(name)


_IS = r"(?i:is|was|are|be)"
_CHOICES = (
    re.compile(r"\\boxed\s*\{\s*[(\[]?(?P<boxed>[A-Za-z])(?:[)\].:][^}]*|\s*)\}"),
    re.compile(r"(?i:<answer>)\s*[(\[]?(?P<tagged>[A-Za-z])(?:[)\].:][^<]*|\s*)(?i:</answer>)"),
    re.compile(
        rf"\b(?i:answer|choice|option|letter)\b(?:[^.\n:=?!]{{0,60}}?\b{_IS}\b\s*:?|\s*[:=]){_SAID}{_letter('named')}"
        r"|\b(?:I|i|We|we)(?:['’]\w+|\s+would|\s+will|\s+must)?\s+(?i:choose|chose|pick|select|go\s+with)"
        rf"{_SAID}{_letter('chosen')}"
        rf"|(?<![\w'’]){_letter('judged')}\s+{_IS}\s+(?i:the\s+)?(?i:correct|right|best|true)\b"
    ),
    re.compile(r"^[ \t#>-]*[(\[]?(?P<line>[A-Za-z])[)\]]?[.:)]?[ \t]*\r?$", re.MULTILINE),
    re.compile(r"^\s*[(\[]?(?P<first>[A-Za-z])[\].:)]\s"),
    re.compile(rf"\b(?i:answer|choice|option)\s+{_letter('weak')}(?!\s+{_IS}\s+(?i:not|wrong|incorrect|false)\b)"),
    re.compile(r"(?<!\bnot )(?<![\w'’])(?:[(\[](?P<last_marked>[A-Za-z])[)\]]|(?P<last>[A-HJ-Z]))[\s.!]*$"),
)
"""How an answer is said, the surest first; of a form the last one counts."""
_DRESS = re.compile(r"\\(?:text|math|bf|rm)[a-z]*\s*\{([^{}]*)\}")
_ORNAMENT = re.compile(r"[*`$\"“”]|\\[()\[\]]|__")


def _undressed(text: str) -> str:
    r"""Return a text without what only makes it bold, upright or a formula.

    >>> _undressed(r"**So** $\boxed{\textbf{(B)}}$")
    'So \\boxed{(B)}'
    """
    while (plain := _DRESS.sub(r"\1", text)) != text:
        text = plain
    return _ORNAMENT.sub("", text)


def multiple_choice(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    letters: str = "ABCDEFGHIJ",
) -> float:
    r"""Compare the chosen letter with the true one, as in `\boxed{B}`, `<answer>B</answer>`, "the answer is (B)", "B".

    Bold type, `$` and `\text{}` are read through. "A", "I" and small letters may be words: bare, they count only where
    the sentence ends or turns, as in "The answer is A, because".

    Args:
        data_source: ignored.
        solution_str: the response; the last letter in the first of these forms that it has counts.
        ground_truth: the letter, or the number of the choice from 0.
        extra_info: ignored.
        letters: of the choices.
    """
    truth = letters[ground_truth] if isinstance(ground_truth, int) else str(ground_truth).strip().strip("().").upper()
    if truth not in letters or len(truth) != 1:
        raise ValueError(f"multiple_choice: expected a letter of {letters} or its number, found {ground_truth!r}")
    end = _undressed(solution_str[-4000:])
    for form in _CHOICES:
        found = [str(said[said.lastgroup or 0]).upper() for said in form.finditer(end)]
        if chosen := [letter for letter in found if letter in letters]:
            return float(chosen[-1] == truth)
    return 0.0


def reasoning_gym(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    dataset: str | None = None,
    tag: str | None = "answer",
) -> float:
    """Score by the scorer of a reasoning-gym data set.

    Args:
        data_source: names the data set if nothing else does: `reasoning_gym:chain_sum`, or `chain_sum`.
        solution_str: the response.
        ground_truth: the entry's answer.
        extra_info: the entry's metadata; its `source_dataset` names the data set if `dataset` does not.
        dataset: such as `chain_sum`.
        tag: takes what the last `<tag>...</tag>` holds, or the whole response without one; null: always the whole.
    """
    from reasoning_gym import get_score_answer_fn  # pyright: ignore[reportMissingImports]

    metadata = extra_info if isinstance(extra_info, dict) else {}
    name = dataset or metadata.get("source_dataset") or data_source.rpartition(":")[2]
    answer = tagged(solution_str, tag) if tag else None
    entry = {"question": "", "answer": ground_truth, "metadata": metadata}
    scorer: Callable[..., float] = get_score_answer_fn(name)
    return float(scorer(answer=solution_str.strip() if answer is None else answer, entry=entry))


def tagged(text: str, tag: str) -> str | None:
    """Return what the last `<tag>...</tag>` of a text holds, without white space at its ends.

    >>> tagged("<answer>1</answer> no, <answer> 2 </answer>", "answer")
    '2'
    """
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inner = before.rpartition(f"<{tag}>")
    return inner.strip() if closing and opening else None


def _number_in(text: str) -> Decimal | None:
    """Return the first number of a text; commas are part of it where they divide thousands.

    >>> _number_in(" $1,234.50 in all"), _number_in("7/2"), _number_in("1e3"), _number_in("12,5,7"), _number_in("none")
    (Decimal('1234.50'), Decimal('3.5'), Decimal('1E+3'), None, None)
    """
    found = _NUMBER.search(text[:200].translate(_MINUS))
    number = found[0].replace("$", "") if found else ""
    if "," in number and not _THOUSANDS.fullmatch(number):
        return None
    whole, _, divisor = number.replace(",", "").partition("/")
    try:
        return Decimal(whole) / Decimal(divisor) if divisor else Decimal(whole)
    except DecimalException:
        return None
