"""A sandbox behind a URL, in the protocol that SandboxFusion speaks: `POST /run_code`."""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from typing import Any

from rallypoint.environments.sandbox.program import Limits, Ran, SandboxError


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """A service that runs programs. What it holds is its own to say; limits of memory and files are its own, too."""

    url: str

    @property
    def name(self) -> str:
        """See `Sandbox.name`."""
        return f"remote, {self.url}"

    def run(self, code: str, *, stdin: str = "", limits: Limits = Limits()) -> Ran:  # noqa: B008 - frozen
        """See `Sandbox.run`."""
        asked = {"code": code, "stdin": stdin, "language": "python", "run_timeout": limits.time_s}
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/run_code",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=limits.time_s + 30.0) as reply:
                answer = json.load(reply)
            return _ran(answer, limits)
        except (OSError, ValueError, TypeError, AttributeError, urllib.error.URLError) as error:
            raise SandboxError(f"{self.url}: {error}") from None


def _ran(answer: Any, limits: Limits) -> Ran:
    result = answer.get("run_result")
    if answer.get("status") == "SandboxError" or not result:
        raise ValueError(f"the service failed: {answer.get('message') or answer}"[:300])
    stdout, stderr = ((result.get(name) or "")[: limits.output_kib << 10] for name in ("stdout", "stderr"))
    if result.get("status") == "TimeLimitExceeded":
        return Ran("timeout", stdout, stderr, None)
    status = result.get("return_code")
    return Ran("ok" if status == 0 else "failed", stdout, stderr, status)
