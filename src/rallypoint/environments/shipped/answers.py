"""Rewards that find the answer in a response and compare it with the ground truth: 1 if it is right, else 0.

Invariant: a response without an answer that can be read is wrong, and is never an error.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from decimal import Decimal, DecimalException
from typing import Any

_AMOUNT = re.compile(
    r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)"  # 1.234,5: a point that divides thousands
    r"|\d{1,3}(?:[ '_]\d{3})+(?![\d/])(?:[.,]\d+)?"
    r"|\d+ \d+/\d+"
    r"|(?:\d(?:[\d,]*\d)?(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+|\s*/\s*\d+)?"
)
"""A number without its sign."""
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?![\d,]).*")
_SIGN = re.compile(
    r"(?:(?:^|[=:(])\s*([-+])\s*|(?<![\w)])([-+])|\b(minus|negative)\s+)?(?:\\?[$€£¥₹]\s*([-+])?)?$", re.IGNORECASE
)
"""What may stand before a number; a sign apart from it is one only where nothing stands before that."""
_OPERATOR = r"[ \t]*(?:[-+*/^×÷·]|\*\*|\\times|\\cdot|\\div)[ \t]*[({$\\]*"
_OPERATOR_BEFORE = re.compile(rf"(?:[\d)}}]|\b[a-zA-Z]){_OPERATOR}$")
_OPERATOR_AFTER = re.compile(rf"{_OPERATOR}\d")
_ASCII = str.maketrans(
    {
        **{chr(0xFF01 + place): chr(0x21 + place) for place in range(94)},  # fullwidth
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\u207b\ufe63", "-"),
        **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
        **dict.fromkeys("\u2019\u02bc", "'"),
    }
)
"""Signs, digits and spaces as typographers have them."""


def exact(
    data_source: str,  # noqa: ARG001 - every reward is given the same four
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    tag: str | None = None,
    ignore_case: bool = False,
    normalize: bool = False,
) -> float:
    """Compare the whole response with the truth, or with any of a list of them; white space at the ends is ignored.

    Args:
        data_source: ignored.
        solution_str: the response.
        ground_truth: text or number, or a list of those that are right.
        extra_info: ignored.
        tag: compares what the last `<tag>...</tag>` holds instead; without one the response is wrong.
        ignore_case: whether "Yes" is "yes".
        normalize: compares as SQuAD does: without case, punctuation, and the articles a, an and the.
    """
    found = solution_str if tag is None else tagged(solution_str, tag)
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    read = _words if normalize else str.casefold if ignore_case else str
    return float(found is not None and read(found.strip()) in [read(str(one).strip()) for one in truths])


def _words(text: str) -> str:
    """Return the words of an answer.

    >>> _words("The U.S. and a  Half-Life!")
    'us and halflife'
    """
    kept = "".join(one for one in text.casefold() if one not in string.punctuation)
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def gsm8k(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    flexible: bool = False,
) -> float:
    """Compare the number after the last `####` with that of the truth, as numbers.

    What stands after the last `=` of its line counts, as in `#### 5 + 2 = 7`. A calculation without its result is no
    number. Thousands may be divided by commas, spaces, apostrophes, or by points before a decimal comma.

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
    found = _number_in(answer) if mark else _last_number(solution_str[-2000:]) if flexible else None
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

    truth = _no_dollars(str(ground_truth).rpartition("####")[2].strip())
    is_marked = truth.count("$") > 1 or "\\boxed" in truth
    gold = parse(_last_box(truth) if is_marked else f"\\boxed{{{truth}}}")
    if not gold:
        raise ValueError(f"math: the ground truth cannot be read as mathematics: {truth[:100]!r}")
    return float(bool(verify(gold, parse(_last_box(_no_dollars(solution_str[-8000:]))))))


def _no_dollars(text: str) -> str:
    r"""Return a text without `\$`, a sign of money in LaTeX, which would be read as the end of a formula."""
    return re.sub(r"(?<!\\)\\\$", "", text)


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
    """Return the number that an answer has; what stands in brackets after it, or on a later line, is not read.

    >>> _number_in(" $1,234.50 in all"), _number_in("7/2"), _number_in("1e3"), _number_in("12,5,7"), _number_in("none")
    (Decimal('1234.50'), Decimal('3.5'), Decimal('1E+3'), None, None)
    >>> _number_in("- 3"), _number_in("5 + 2 = 7"), _number_in("5 + 2"), _number_in("1.234,5"), _number_in("1 000 (so)")
    (Decimal('-3'), Decimal('7'), None, Decimal('1234.5'), Decimal('1000'))
    """
    lines = [line for line in _plain(text[:200]).splitlines() if _AMOUNT.search(line)]
    if not lines:
        return None
    head = re.split(r"(?<=\S)\s*\(", lines[0])[0]
    sides = (head if _AMOUNT.search(head) else lines[0]).split("=")
    part = next(filter(_AMOUNT.search, reversed(sides))).strip()
    found = _AMOUNT.search(part)
    return _signed(part, found) if found else None


def _last_number(text: str) -> Decimal | None:
    """Return the last number of a text.

    >>> _last_number("from 1,234 to -3."), _last_number("5 - 3 = 2"), _last_number("- 3 apples"), _last_number("10 - 3")
    (Decimal('-3'), Decimal('2'), Decimal('-3'), None)
    """
    text = _plain(text)
    found = [*_AMOUNT.finditer(text)]
    return _signed(text, found[-1]) if found else None


def _plain(text: str) -> str:
    r"""Return a text whose numbers are written in ASCII, without LaTeX's spaces and braces.

    >>> _plain("\u22123{,}000\\,kg, **7**")
    '-3,000 kg, 7'
    """
    text = text.translate(_ASCII).replace("{,}", ",").replace("\\,", " ")
    text = re.sub(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}", r"\1/\2", text)
    return re.sub(r"\\!|(?<!\d)\*\*|\*\*(?!\d)|`", "", text)


def _signed(text: str, amount: re.Match[str]) -> Decimal | None:
    """Return a number of a text with its sign; None where it is a part of a calculation, or cannot be read."""
    sign = _SIGN.search(text, max(0, amount.start() - 40), amount.start())
    signs = [one for one in (sign.groups() if sign else ()) if one]
    begins = sign.start() if sign else amount.start()
    if not signs and _OPERATOR_BEFORE.search(text, max(0, begins - 40), begins):
        return None
    if _OPERATOR_AFTER.match(text, amount.end()):
        return None
    size = _size(amount[0])
    return -size if size is not None and any(one not in "+" for one in signs) else size


def _size(written: str) -> Decimal | None:
    """Return the value of a number without a sign; commas are part of it where they divide thousands.

    >>> [_size(one) for one in ("1,234.5", "1.234,5", "1 000", "3 1/2", "12,5")]
    [Decimal('1234.5'), Decimal('1234.5'), Decimal('1000'), Decimal('3.5'), None]
    """
    if re.fullmatch(r"\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:[ '_]\d{3})+,\d+", written):
        written = written.replace(".", "").replace(",", ".")
    elif "," in written and not _THOUSANDS.fullmatch(written):
        return None
    above, _, below = written.replace(",", "").partition("/")
    whole, _, above = above.strip().rpartition(" ") if below else ("", "", re.sub(r"[ '_]", "", above))
    try:
        return Decimal(whole or 0) + Decimal(above) / Decimal(below.strip() or 1) if below or whole else Decimal(above)
    except DecimalException:
        return None


_FENCE = re.compile(r"^[ \t]*```[\w+-]*[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def block(text: str) -> str:
    r"""Return what the last fenced block of a text holds, or the whole text without one.

    >>> block("so:\n```python\nx = 1\n```\n")
    'x = 1\n'
    """
    found = _FENCE.findall(text)
    return found[-1] if found else text
