"""A trained model behind an endpoint. One process, no Ray.

Three threads: the main one, which waits for the end; one that serves clients; one in which the engine steps. With
`follow` a fourth looks for newer checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal

from rallypoint import checkpoint as checkpoints
from rallypoint.data import TemplateProbe, load_tokenizer
from rallypoint.errors import CheckpointError, GenerationError, ModelError, ServingError
from rallypoint.generation import EngineThread, NativeEngine
from rallypoint.models import named_weights
from rallypoint.prepare.model_limits import RowLimits, check_ids, stop_tokens
from rallypoint.recipes.saving import STATE
from rallypoint.recipes.use import Trained
from rallypoint.serving import LOOPBACK, Access, Bridge, Codec, Model, Server, bind, check_keys, make_app

_LOOK_EVERY_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a model is served."""

    host: str
    """To listen at."""
    port: int
    """To listen at; 0 is any that is free."""
    keys: tuple[str, ...]
    """API keys, of which callers must have one."""
    max_concurrency: int
    """Responses that may be under way at once."""
    max_body_bytes: int
    """Most bytes of a request."""
    max_logprobs: int
    """Likeliest tokens in place of each of a prompt's that a client may ask for."""
    dtype: str | None
    """Type of the weights; None: as in training, or float32."""
    cache_tokens: int
    """Number of tokens whose keys and values there is memory for."""
    exact: bool
    """Whether tokens depend on the request alone, bit for bit."""
    follow: bool
    """Whether to take over newer checkpoints of the run."""
    on_load: Literal["keep", "recompute"]
    """Whether responses under way go on with their old keys and values under new weights."""
    grace_s: float
    """How long requests under way may take to end after the end was asked for."""


class Serving:
    """A server with its engine, from a model folder; as a context it serves."""

    def __init__(
        self, trained: Trained, options: Options, *, say: Callable[[str], None], on_end: Callable[[], None]
    ) -> None:
        """Take the port and load the model.

        Args:
            trained: what to serve.
            options: how.
            say: called with one line about what happens.
            on_end: called when the server has ended, for whatever reason, or is of no use any more; see `failure`.

        Raises:
            ServingError: the port is taken, or a key is missing or unusable.
            ModelError: the folder cannot be loaded, or there is nothing to follow.
            CacheError: there is no memory for so many keys and values.
        """
        host, port = options.host, options.port
        check_keys(host, options.keys)
        if options.follow and trained.config is None:
            raise ModelError(f"{trained.path} lies in no run, so that there are no newer checkpoints to follow")
        bound = bind(host, port)
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
        self._has_keys, self._max_body_bytes = bool(options.keys), options.max_body_bytes
        self._dtype = options.dtype or (trained.config.model.dtype if trained.config else "float32")
        tokenizer = load_tokenizer(trained.tokenizer_path, trust_remote_code=trained.trusts_remote_code, for_chat=False)
        self._can_chat = tokenizer.chat_template is not None
        codec = Codec(tokenizer)
        model = trained.load(self._dtype).model
        num_ids = RowLimits.of(model.config).num_ids
        check_ids(trained.path, TemplateProbe.of(tokenizer).ids, tokenizer, num_ids)
        engine = NativeEngine(
            model,
            max_rows=options.max_concurrency,
            cache_tokens=options.cache_tokens,
            mode="exact" if options.exact else "fast",
            on_load=options.on_load,
            decode=codec.decode,
            version=_version_of(trained),
        )
        engine.step()  # with nothing to do, it has its memory now: too little is said before anybody asks
        self.failure: GenerationError | None = None
        """Why the engine was closed."""
        self._say, self._on_end = say, on_end
        self._thread = EngineThread(engine, on_failure=self._hear)
        self._model = Model(
            name=_name_of(trained),
            engine=engine,
            bridge=Bridge(self._thread, max_concurrency=options.max_concurrency),
            codec=codec,
            stop_tokens=stop_tokens(trained.model_path, tokenizer, num_ids),
            max_logprobs=options.max_logprobs,
        )
        access = Access(
            keys=options.keys, hosts=tuple(dict.fromkeys((*LOOPBACK, host))), max_body_bytes=options.max_body_bytes
        )
        self._server = Server(make_app(self._model, access), bound, grace_s=options.grace_s, on_end=on_end, say=say)
        self._follower = _Follower(trained, self._thread, self._dtype, say) if options.follow else None

    def __enter__(self) -> Serving:
        try:
            self._server.start()
        except ServingError:
            self._thread.close()
            raise
        if self._follower:
            self._follower.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._follower:
            self._follower.stop()
        self._server.stop(self._thread.close)

    @property
    def url(self) -> str:
        """Where clients reach it, without the path."""
        return self._url

    @property
    def num_running(self) -> int:
        """Responses that are under way."""
        return self._model.bridge.num_running

    def _hear(self, failure: GenerationError) -> None:
        """Say that a step has failed, and end if there is no sense in another one."""
        where = traceback.format_exception(failure.__cause__) if failure.__cause__ else []
        self._say(f"{''.join(where)}{failure}")
        if self._thread.has_failed:
            self.failure = failure
            self._on_end()

    def give_up(self) -> None:
        """Let nothing that is under way end by itself."""
        self._thread.close()

    def describe(self) -> str:
        """Return what a person needs who wants to call it."""
        model, key = self._model, ' -H "Authorization: Bearer $RALLYPOINT_API_KEY"' if self._has_keys else ""
        path, prompt = (
            ("chat/completions", {"messages": [{"role": "user", "content": "..."}]})
            if self._can_chat
            else ("completions", {"prompt": "..."})
        )
        body = shlex.quote(json.dumps({"model": model.name, **prompt}))
        return (
            f"serving {model.name} (version {model.engine.version}, {self._dtype}) at {self._url}/v1\n"
            f"limits: {model.bridge.max_concurrency} responses at once, {model.engine.max_request_tokens} tokens each "
            f"with the prompt, {self._max_body_bytes:,} bytes a request, {self._server.max_connections} connections; "
            f"{'a key is needed' if self._has_keys else 'no key, this machine only'}\n"
            f"try:    curl {self._url}/v1/{path}{key} -H 'Content-Type: application/json' -d {body}\n"
            "end:    Ctrl-C"
        )


class _Follower:
    """Loads the newest checkpoint of a run whenever there is a newer one."""

    def __init__(self, trained: Trained, thread: EngineThread, dtype: str, say: Callable[[str], None]) -> None:
        self._trained, self._thread, self._dtype, self._say = trained, thread, dtype, say
        self._folder = Path(trained.path).parent
        self._is_over = threading.Event()
        self._looking = threading.Thread(target=self._look, name="follow")

    def start(self) -> None:
        self._looking.start()

    def stop(self) -> None:
        """Return when what is being loaded is loaded."""
        self._is_over.set()
        self._looking.join()

    def _look(self) -> None:
        newest, failed = int(Path(self._trained.path).name.removeprefix("step_")), 0
        while not self._is_over.wait(_LOOK_EVERY_S):
            found = checkpoints.steps(self._folder)
            if not found or found[-1] <= newest:
                continue
            name = checkpoints.checkpoint_name(found[-1])
            try:
                self._take_over(dataclasses.replace(self._trained, path=str(self._folder / name)))
            except Exception as error:  # noqa: BLE001 - may be over at the next look: said once, and tried again
                if failed != found[-1]:
                    self._say(f"{name} is not taken over, the weights of before are served still: {error}")
                failed = found[-1]
                continue
            newest = found[-1]
            self._say(f"serving {name} now")

    def _take_over(self, trained: Trained) -> None:
        checkpoints.verify(Path(trained.path))
        version, weights = _version_of(trained), named_weights(trained.load(self._dtype).model)
        self._thread.call(lambda engine: engine.load(version, weights))


def _name_of(trained: Trained) -> str:
    """Return the name of the run; of a model that lies in none, that of its folder or on the hub."""
    path = Path(trained.path)
    if trained.config is not None:
        return path.parent.parent.name
    return path.name if path.is_dir() else trained.path


def _version_of(trained: Trained) -> int:
    """Return how many optimizer steps made the weights; 0 if that is not known."""
    path = Path(trained.path) / STATE
    if not path.is_file():
        return 0
    try:
        return int(json.loads(path.read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: expected the version of the weights: {error}") from error
