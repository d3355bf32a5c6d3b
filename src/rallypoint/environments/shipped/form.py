"""Rewards for the form of a response: JSON by a schema, a regular expression, a length."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.environments.shipped.answers import block


def json_schema(
    data_source: str,  # noqa: ARG001 - every reward is given the same four
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,  # noqa: ARG001
    *,
    schema: dict[str, Any] | None = None,
) -> float:
    """Return 1 if the response is JSON that a schema allows: the whole response, or its last fenced block.

    Args:
        data_source: ignored.
        solution_str: the response.
        ground_truth: the schema, an object or its text, if `schema` is null.
        extra_info: ignored.
        schema: a JSON schema for all rows.
    """
    from jsonschema import validators

    rules = schema or (json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth)
    kind = validators.validator_for(rules)
    kind.check_schema(rules)
    try:
        found = json.loads(block(solution_str), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return 0.0
    try:
        return float(kind(rules).is_valid(found))
    except RecursionError:
        return 0.0


def regex(
    data_source: str,  # noqa: ARG001
    solution_str: str,
    ground_truth: Any,  # noqa: ARG001
    extra_info: Any = None,  # noqa: ARG001
    *,
    pattern: str,
    whole: bool = True,
) -> float:
    r"""Return 1 if a response has the form of a regular expression, in which `.` is a line's end, too.

    Args:
        data_source: ignored.
        solution_str: the response; white space at its ends is ignored.
        ground_truth: ignored.
        extra_info: ignored.
        pattern: such as `(<think>)?.*</think>\s*<answer>.*</answer>`.
        whole: whether the whole response must match, or a part is enough.
    """
    form = re.compile(pattern, re.DOTALL)
    return float(bool((form.fullmatch if whole else form.search)(solution_str.strip())))


def regex_problem(parameters: Mapping[str, object]) -> str | None:
    """Say why a pattern cannot be used.

    >>> regex_problem({"pattern": "(a"})
    "regex: the pattern '(a' is not a regular expression: missing ), unterminated subpattern at position 0"
    """
    pattern = parameters["pattern"]
    if not isinstance(pattern, str):
        return f"regex: expected text for pattern, found {pattern!r}; put it in quotes"
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError) as error:  # the second of a repetition that is too large
        return f"regex: the pattern {pattern!r} is not a regular expression: {error}"
    return None


def length(
    data_source: str,  # noqa: ARG001
    solution_str: str,  # noqa: ARG001
    ground_truth: Any,  # noqa: ARG001
    extra_info: Any = None,  # noqa: ARG001
    *,
    token_ids: Sequence[int],
    most: int,
    least: int = 0,
    slack: int = 0,
) -> float:
    """Return 1 for a response of `least` to `most` tokens, falling to 0 over `slack` more or fewer.

    Args:
        data_source: ignored.
        solution_str: ignored.
        ground_truth: ignored.
        extra_info: ignored.
        token_ids: the response, with the token that ended it.
        most: tokens.
        least: tokens.
        slack: tokens.
    """
    beyond = max(len(token_ids) - most, least - len(token_ids), 0)
    return max(0.0, 1.0 - beyond / slack) if slack else float(beyond == 0)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
