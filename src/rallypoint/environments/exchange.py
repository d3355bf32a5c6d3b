"""One request to a service over HTTP, and the JSON that it answers with.

Owns: what is taken for an answer. Must not know: judges, sandboxes. It needs the standard library only. Invariants: a
redirect is never followed, since urllib would hand the API key to whatever host it names, and take that host's answer
for the service's; and no answer takes more memory than the caller allows.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

MOST_MIB = 16
"""Size of an answer that is a text of a model, or what a program wrote."""


class UnusableAnswerError(ValueError):
    """The service answered, and will answer so again: with a redirect, or with too much."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Leave the redirect to the caller, as an error with its status."""


_OPENER = urllib.request.build_opener(_NoRedirects)


def ask(request: urllib.request.Request, timeout_s: float, most_mib: int = MOST_MIB) -> Any:
    """Return the JSON that answers a request.

    Args:
        request: a whole one; it may hold a key.
        timeout_s: of each wait for the network.
        most_mib: the most that the answer may have.

    Raises:
        UnusableAnswerError: it is a redirect, or larger.
        HTTPError: the service refused.
        OSError, HTTPException, ValueError: it was not reached, or its answer is not JSON.
    """
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            text = answer.read((most_mib << 20) + 1)
    except urllib.error.HTTPError as error:
        if 300 <= error.code < 400:
            raise UnusableAnswerError(
                f"status {error.code}: it redirects to {error.headers.get('Location', 'nowhere')}, which is not "
                "followed, as it would be given the API key and its answer taken; set url to where the service is"
            ) from None
        raise
    if len(text) > most_mib << 20:
        raise UnusableAnswerError(f"it answered with more than {most_mib} MiB")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its answer is JSON that is nested too deeply") from None
