"""The page as an ASGI application: its files, its panels as JSON, and what is new as server-sent events.

Owns: routes, and who may look. Must not know: what a panel shows, how it is drawn. Needs the extra `serve`.

Whatever comes from a run is data: it leaves here as JSON alone, and the page may load nothing but its own files.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Self
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request, cookie_parser
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rallypoint.journal import STEP
from rallypoint.observability.exposition import exposition
from rallypoint.page.answers import STATIC, answer_or_why, to_json
from rallypoint.page.run_reader import RunReader
from rallypoint.serving import LOOPBACK, Access, Server, bind, check_keys, numbers_route, with_errors

_COOKIE = "rally_view"
_LOOK_EVERY_S, _HEARTBEATS = 0.5, 20
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


class _Guard:
    """Lets those pass who may look, and says of every answer what a browser may do with it."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or refuse it; `/?key=KEY` keeps the key in a cookie."""
        headers = MutableHeaders(raw=list(scope["headers"]))
        key = cookie_parser(headers.get("cookie", "")).get(_COOKIE, "")
        request, app = Request(scope), self._app
        given = request.query_params.get("key", "")
        key = (given or unquote(key)).encode("ascii", "backslashreplace").decode()  # no header has others
        if key and "authorization" not in headers:
            headers["authorization"] = f"Bearer {key}"
        refusal = self._access.refusal(Headers(raw=headers.raw), f"{scope['path']} ")  # no path is for all
        if refusal is not None:
            app = Response(to_json({"error": str(refusal)}), refusal.status, media_type="application/json")
        elif given and self._access.keys and scope["path"] == "/":
            app = RedirectResponse("/", 303)
            app.set_cookie(_COOKIE, quote(given), httponly=True, samesite="strict")

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                added["content-security-policy"] = _POLICY
                added["x-content-type-options"] = "nosniff"
                added["referrer-policy"] = "no-referrer"
                added["cache-control"] = "no-store" if scope["path"].startswith("/api/") else "no-cache"
            await send(message)

        await app(scope, receive, answered)


def make_page(runs: Sequence[RunReader], access: Access, is_over: threading.Event | None = None) -> Starlette:
    """Return the application.

    Args:
        runs: at least one; the first is shown first.
        access: who may look.
        is_over: set when streams of news are to end.
    """
    is_over = is_over or threading.Event()

    async def page(request: Request) -> Response:
        del request
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    async def panel(request: Request) -> Response:
        asked, name = dict(request.query_params), request.path_params["name"]
        text = await run_in_threadpool(lambda: to_json(answer_or_why(runs, name, asked)))
        return Response(text, media_type="application/json")

    async def live(request: Request) -> Response:
        del request
        return StreamingResponse(_changes(runs, is_over), media_type="text/event-stream")

    def measured() -> str:
        found = dict[str, tuple[int, dict[str, float]]]()
        for run in (reader.now() for reader in runs):
            newest = {name: value for metrics in run.steps.values() for name, value in metrics.items() if name != STEP}
            found[run.name] = run.state.step, newest
        return exposition(found)

    routes = [
        Route("/", page),
        Route("/live", live),
        numbers_route(measured),
        Route("/api/{name}", panel),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return with_errors(routes, [Middleware(_Guard, access=access)])


class PageServer:
    """The page of some runs at an address; as a context it serves."""

    def __init__(
        self,
        runs: Sequence[RunReader],
        *,
        host: str = LOOPBACK[1],
        port: int = 0,
        keys: tuple[str, ...] = (),
        say: Callable[[str], None] = print,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the port.

        Args:
            runs: at least one; the first is shown first.
            host: to listen at.
            port: to listen at; 0 is any that is free.
            keys: of which callers must have one, if there are any.
            say: called with one line about clients that misbehave.
            on_end: called when the server has ended.

        Raises:
            ServingError: the port is taken, or a key is missing or unusable.
        """
        check_keys(host, keys)
        bound = bind(host, port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}/"
        access = Access(keys=keys, hosts=tuple(dict.fromkeys((*LOOPBACK, host))), max_body_bytes=2**16)
        self._is_over = threading.Event()
        self._server = Server(make_page(runs, access, self._is_over), bound, grace_s=0.0, on_end=on_end, say=say)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._server.stop(lambda: None)


async def _changes(runs: Sequence[RunReader], is_over: threading.Event) -> AsyncIterator[str]:
    """Yield an event for each run that has changed, with its newest step, and now and then a sign of life."""
    seen: dict[str, object] = {}
    quiet = 0
    while not is_over.is_set():
        quiet += 1
        for run in runs:
            now = await run_in_threadpool(news_of, run)
            if seen.get(run.name) != now:
                seen[run.name], quiet = now, 0
                yield f"data: {to_json(now)}\n\n"
        if quiet >= _HEARTBEATS:
            quiet = 0
            yield ": alive\n\n"
        await asyncio.sleep(_LOOK_EVERY_S)


def news_of(run: RunReader) -> dict[str, object]:
    """Return what changes when a run does."""
    now = run.now()
    return {"run": run.name, "version": now.version, "rollouts": now.rollouts_changed, "running": now.is_running}
