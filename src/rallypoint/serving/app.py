"""The endpoint as an ASGI application: OpenAI's API, `/health`, `/metrics`, and a page that says what there is.

Owns: routes, who may call, and that an error is always a status with a JSON body. Must not know: sockets, processes,
checkpoints.
"""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rallypoint.errors import EndpointError, GenerationError, RallyError
from rallypoint.observability.exposition import MEDIA_TYPE
from rallypoint.serving import anthropic_messages
from rallypoint.serving.anthropic_messages import MessagesRequest
from rallypoint.serving.handlers import Model, SamplingRoute, model_routes, respond
from rallypoint.serving.openai_responses import ResponsesRequest
from rallypoint.serving.requests import ChatRequest, CompletionRequest, GenerateRequest
from rallypoint.serving.responses import JSON, error_body, status_of

_RETRY_AFTER_S, _RETRY_WHEN_BUSY_S = 1, 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may call, and with how much."""

    keys: tuple[str, ...]
    """API keys, of which a caller must have one; empty: everybody may call who reaches us under one of `hosts`."""
    hosts: tuple[str, ...]
    """Names that callers without a key may know us by; a page in a browser that was lured here knows another one."""
    max_body_bytes: int
    patience_s: float = 60.0
    """How long a caller may take to send what it asks, once its head has arrived."""

    def refusal(self, headers: Headers, path: str) -> EndpointError | None:
        """Say why a call is refused, if it is."""
        if not self.keys:
            host = headers.get("host", "").lower()
            name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
            if name in self.hosts:
                return None
            return EndpointError(403, f"without keys, calls are taken under {', '.join(self.hosts)} only")
        key = key_of(headers)
        # Every key is compared, so that the time that it takes tells nothing.
        is_known = sum(hmac.compare_digest(key.encode(), known.encode()) for known in self.keys) > 0
        if path in ("/", "/health") or is_known:
            return None
        message = "expected the header 'Authorization: Bearer KEY' with a key that this server was started with"
        return EndpointError(401, message, code="invalid_api_key")


def key_of(headers: Headers) -> str:
    """Return the key that a caller has, as clients of OpenAI or of Anthropic send it; empty without one."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


class AccessGuard:
    """Lets those pass who may call."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or refuse it."""
        refusal = self._access.refusal(Headers(scope=scope), scope["path"])
        await (self._app if refusal is None else _refused(refusal, scope["path"]))(scope, receive, send)


def make_app(model: Model, access: Access, measured: Callable[[], str] | None = None) -> Starlette:
    """Return the application.

    Args:
        model: that answers.
        access: who may call.
        measured: returns a run's newest numbers as Prometheus reads them; None where no run is in training.
    """

    async def health(request: Request) -> Response:
        del request
        failure, has_failed = model.bridge.failure, model.bridge.has_failed
        body: JSON = {
            "status": "failed" if has_failed else "ok",
            "error": None if failure is None else str(failure),
            "model": model.name,
            "version": model.engine.version,
            "num_running": model.bridge.num_running,
            "max_concurrency": model.bridge.max_concurrency,
            "max_request_tokens": model.engine.max_request_tokens,
        }
        return respond(body, 503 if has_failed else 200)

    async def page(request: Request) -> Response:
        base = f"{request.url.scheme}://{request.url.netloc}"
        key = "any key" if not access.keys else "the key that it was started with"
        text = (
            f"rallypoint serves {model.name!r} (version {model.engine.version} of its weights) as OpenAI's API does.\n"
            f"Clients: base_url={base}/v1 with {key}; POST {base}/v1/chat/completions or {base}/v1/completions.\n"
            f"State: {base}/health; the fields that it understands: docs/serve.md of rallypoint.\n"
        )
        return Response(text, media_type="text/plain")

    limits = access.max_body_bytes, access.patience_s
    return with_errors(
        [
            Route("/", page),
            Route("/health", health),
            *([] if measured is None else [numbers_route(measured)]),
            *model_routes(model.name, model.engine.max_request_tokens),
            Route("/v1/chat/completions", SamplingRoute(model, ChatRequest, *limits), methods=["POST"]),
            Route("/v1/responses", SamplingRoute(model, ResponsesRequest, *limits), methods=["POST"]),
            Route("/v1/messages", SamplingRoute(model, MessagesRequest, *limits), methods=["POST"]),
            Route("/v1/completions", SamplingRoute(model, CompletionRequest, *limits), methods=["POST"]),
            Route("/inference/v1/generate", SamplingRoute(model, GenerateRequest, *limits), methods=["POST"]),
        ],
        [Middleware(AccessGuard, access=access)],
    )


def numbers_route(measured: Callable[[], str]) -> Route:
    """Return the route that tells a run's numbers."""

    async def metrics(request: Request) -> Response:
        del request
        return Response(await run_in_threadpool(measured), headers={"content-type": MEDIA_TYPE})

    return Route("/metrics", metrics)


def with_errors(routes: Sequence[BaseRoute], middleware: Sequence[Middleware] = ()) -> Starlette:
    """Return an application in which every error is a status with a JSON body."""
    handlers = {HTTPException: _on_http, RallyError: _on_error, Exception: _on_bug}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # many clients would not send their body again
    return app


def _refused(error: RallyError, path: str) -> Response:
    status = status_of(error)
    headers = {
        401: {"www-authenticate": "Bearer"},
        429: {"retry-after": str(_RETRY_AFTER_S)},
        503: {"retry-after": str(_RETRY_WHEN_BUSY_S)},
    }.get(status)
    if isinstance(error, GenerationError):
        # OpenAI's client sends again what was answered with 500, also what the engine cannot bear.
        headers = {"x-should-retry": "false"}
    write = anthropic_messages.error_body if path.endswith("/v1/messages") else error_body
    return respond(write(error), status, headers)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RallyError), "it is registered for these"
    return _refused(error, request.url.path)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        ends_wrong = request.url.path.endswith("/")
        message += "; ask without the slash at the end" if ends_wrong else "; GET / says what there is"
    return _refused(EndpointError(error.status_code, message), request.url.path)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer; the server prints the traceback."""
    message = f"{type(error).__name__} in the server, whose own output says more"
    return _refused(EndpointError(500, message), request.url.path)
