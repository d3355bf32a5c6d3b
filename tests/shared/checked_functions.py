"""What checks the shapes and types of calls of the algorithms: beartype, but for functions within functions.

These are made anew with each call of the function around them, and to make one that checks takes longer than the call.
"""

from collections.abc import Callable
from typing import Any

import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    return function if "<locals>" in function.__qualname__ else beartype.beartype(function)
