"""A sandbox behind a URL, in the protocol that SandboxFusion speaks: `POST /run_code`."""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from rallypoint.environments.exchange import MOST_MIB, ask
from rallypoint.environments.sandbox.program import Limits, Ran, SandboxError

_MAY_PASS = {429, 500, 502, 503, 504}
"""Statuses of a service that is busy or being restarted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """A service that runs programs. What it holds is its own to say; limits of files are its own, too."""

    url: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    pauses_s: tuple[float, ...] = (0.5, 2.0)
    """Seconds before each further attempt, where the service is busy or gone."""
    sleep: Callable[[float], None] = time.sleep

    @property
    def name(self) -> str:
        """See `Sandbox.name`."""
        return f"remote, {self.url}"

    def run(self, code: str, *, stdin: str = "", limits: Limits = Limits()) -> Ran:  # noqa: B008 - frozen
        """See `Sandbox.run`."""
        asked = {"code": code, "stdin": stdin, "language": "python", "run_timeout": limits.time_s}
        asked["memory_limit_MB"] = limits.memory_mib
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/run_code", json.dumps(asked).encode(), headers)
        for pause_s in (*self.pauses_s, None):
            try:
                most_mib = MOST_MIB + (limits.output_kib >> 7)  # both outputs, and four bytes a character
                return _ran(ask(request, limits.start_s + limits.time_s, most_mib), limits)
            except (OSError, http.client.HTTPException, ValueError, TypeError, AttributeError) as error:
                if pause_s is None or not _may_pass(error):
                    raise SandboxError(f"{self.url}: {error}") from None
            self.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may end otherwise, and soon."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _MAY_PASS
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return isinstance(cause, OSError | http.client.HTTPException) and not isinstance(cause, TimeoutError)


def _ran(answer: Any, limits: Limits) -> Ran:
    result = answer.get("run_result")
    if answer.get("status") == "SandboxError" or not result:
        raise ValueError(f"the service failed: {answer.get('message') or answer}"[:300])
    stdout, stderr = ((result.get(name) or "")[: limits.output_kib << 10] for name in ("stdout", "stderr"))
    took_s = float(result.get("execution_time") or 0.0)
    if result.get("status") == "TimeLimitExceeded":
        return Ran("timeout", stdout, stderr, None, took_s)
    status = result.get("return_code")
    return Ran("ok" if status == 0 else "failed", stdout, stderr, status, took_s)
