"""What the native engine can be asked to be, and which requests its memory is large enough for."""

from __future__ import annotations

from rallypoint.errors import RequestError
from rallypoint.generation.native.sequence import BLOCK_TOKENS
from rallypoint.generation.protocol import Request, is_whole

_LEAST_CACHE_TOKENS = 2 * BLOCK_TOKENS
"""A prompt and its response begin a block each."""


def check_settings(max_rows: object, cache_tokens: object, mode: object, on_load: object) -> None:
    """Refuse what would wait for ever, or be taken for something else.

    Args:
        max_rows: that run together.
        cache_tokens: whose keys and values there is memory for.
        mode: of the engine.
        on_load: what becomes of rows that run when weights come.

    Raises:
        ValueError: one of them is none of what it can be; all that are wrong are named.
    """
    problems = [
        f"{name}={value!r}: expected {expected}"
        for name, value, fits, expected in (
            ("max_rows", max_rows, is_whole(max_rows, 1), "a whole number of at least 1"),
            (
                "cache_tokens",
                cache_tokens,
                is_whole(cache_tokens, _LEAST_CACHE_TOKENS),
                f"a whole number of at least {_LEAST_CACHE_TOKENS}, a block each for a prompt and its response",
            ),
            ("mode", mode, mode in ("fast", "exact"), "'fast' or 'exact'"),
            ("on_load", on_load, on_load in ("keep", "recompute"), "'keep' or 'recompute'"),
        )
        if not fits
    ]
    if problems:
        raise ValueError("; ".join(problems))


def check_room(request: Request, max_new_tokens: int, num_blocks: int) -> None:
    """Refuse a request that would find no memory though it were alone.

    Args:
        request: to be looked at.
        max_new_tokens: that its response may have.
        num_blocks: of keys and values that there is memory for.

    Raises:
        RequestError: it takes more of them.
    """
    needed = sum(-(-count // BLOCK_TOKENS) for count in (len(request.tokens), max_new_tokens))
    if needed > num_blocks:
        raise RequestError(
            f"prompt {request.prompt_index} has {len(request.tokens)} tokens and its response up to "
            f"{max_new_tokens}, which takes {needed} blocks of {BLOCK_TOKENS} tokens, but the cache has "
            f"{num_blocks}; give it more memory, or shorten one of them"
        )
