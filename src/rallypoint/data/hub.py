"""Whether the Hugging Face hub can be reached, in one short attempt; its own client tries for half a minute.

Owns: reachability, and what to do without it. Must not know: what is in a repository.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import queue
import threading
import urllib.error
import urllib.request
import warnings
from pathlib import Path

from rallypoint.as_found import AsFound, GiveBack, variables
from rallypoint.errors import ModelError

_PATIENCE_S = 5.0
_OFFLINE = "HF_HUB_OFFLINE"


_before: dict[str, GiveBack] = {}
"""What gives the variable back, once this process went offline."""


def _go_offline() -> None:
    from huggingface_hub import constants

    _before.setdefault(_OFFLINE, variables([_OFFLINE]))
    os.environ[_OFFLINE] = "1"
    constants.HF_HUB_OFFLINE = True


def _go_online() -> None:
    if not _before:
        return
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = False
    _before.pop(_OFFLINE)()
    check_hub.cache_clear()


hub_as_found = AsFound(lambda: _go_online)
"""Blocks after which this process is online again if `check_hub` went offline in them."""


@functools.cache
def check_hub(name: str) -> None:
    """Ask the hub for a model once; any answer counts as reachable.

    Args:
        name: such as `Qwen/Qwen3-0.6B`; an invalid name is left to the hub's client.

    Without an answer, if the model is in the cache, this process and its children go on as with HF_HUB_OFFLINE=1, and a
    warning says so; see `hub_as_found` for how long.

    Raises:
        ModelError: there is no answer, or HF_HUB_OFFLINE is set, and the model is not in the cache.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return
    remedy = (
        f"where there is a network: hf download {name} --local-dir FOLDER, and give FOLDER instead of the name; or "
        f"set HF_HOME to a cache that has it (now {Path(constants.HF_HOME)})"
    )
    if constants.is_offline_mode():
        if not is_cached:
            raise ModelError(f"{name}: not in the cache, and HF_HUB_OFFLINE forbids to download it; {remedy}")
        return
    problem = unreachable(f"{constants.ENDPOINT}/{name}/resolve/main/config.json")
    if problem is None:
        return
    found = f"{name}: the hub at {constants.ENDPOINT} (HF_ENDPOINT) cannot be reached ({problem})"
    if not is_cached:
        raise ModelError(f"{found}; {remedy}")
    warnings.warn(f"{found}; what the cache has of it is used, as with HF_HUB_OFFLINE=1", stacklevel=2)
    _go_offline()


def unreachable(url: str, patience_s: float = _PATIENCE_S) -> str | None:
    """Return why a URL does not answer, through the proxies of the environment; None if it does."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # The lookup of a name has no deadline, so a thread waits for it.
    threading.Thread(target=lambda: answers.put(_ask(url, patience_s)), daemon=True).start()
    try:
        return answers.get(timeout=2 * patience_s)
    except queue.Empty:
        return f"no answer for {2 * patience_s:g} s"


def _ask(url: str, patience_s: float) -> str | None:
    request = urllib.request.Request(url, method="HEAD")
    try:
        with contextlib.closing(urllib.request.urlopen(request, timeout=patience_s)):
            return None
    except urllib.error.HTTPError:
        return None  # it answers; the hub's client explains what is wrong
    except urllib.error.URLError as error:
        return None if "CERTIFICATE" in str(error.reason) else str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
