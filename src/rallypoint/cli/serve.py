"""`rally serve`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal

from rich.console import Console

from rallypoint.errors import ServingError
from rallypoint.extras import why_not
from rallypoint.recipes.use import find_trained


def serve(
    checkpoint: str,
    *,
    trust_remote_code: bool,
    host: str,
    port: int,
    keys: tuple[str, ...],
    max_concurrency: int,
    max_body_bytes: int,
    max_logprobs: int,
    dtype: str | None,
    cache_tokens: int,
    exact: bool,
    follow: bool,
    on_load: Literal["keep", "recompute"],
    grace_s: float,
) -> None:
    """Serve until Ctrl-C or SIGTERM; a second one cancels the requests that still run."""
    try:
        from rallypoint.recipes.serve import Options, Serving
    except ImportError as error:
        raise ServingError(f"rally serve {why_not(error, ('starlette', 'uvicorn'), 'serve')}") from None
    console = Console(highlight=False, markup=False, soft_wrap=True)
    events: SimpleQueue[str] = SimpleQueue()  # unlike a lock, safe in a signal handler
    options = Options(
        host=host,
        port=port,
        keys=keys,
        max_concurrency=max_concurrency,
        max_body_bytes=max_body_bytes,
        max_logprobs=max_logprobs,
        dtype=dtype,
        cache_tokens=cache_tokens,
        exact=exact,
        follow=follow,
        on_load=on_load,
        grace_s=grace_s,
    )
    trained = find_trained(checkpoint, trust_remote_code=trust_remote_code)
    with Serving(trained, options, say=console.print, on_end=lambda: events.put("ended")) as serving:
        _on_signals(lambda number: events.put(signal.Signals(number).name))
        console.print(serving.describe())
        event = events.get()
        if event == "ended":
            raise ServingError(serving.failure or "the server has ended by itself; what is printed above says why")
        console.print(f"{event}: {serving.num_running} responses under way have {grace_s:g} s to end")
        _on_signals(lambda _: serving.give_up())


def _on_signals(do: Callable[[int], None]) -> None:
    """Call `do` when an end is asked for; previous handlers are lost."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: do(number))
