"""`rally eval`, `rally chat`, `rally export` and `rally serve`: what is done with a trained model."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from rich.console import Console
from rich.markup import escape

from rallypoint.environments.failures import describe_failures
from rallypoint.errors import ModelError, ServingError
from rallypoint.extras import why_not
from rallypoint.recipes.export import export as export_to
from rallypoint.recipes.use import Conversation, find_trained
from rallypoint.recipes.use import evaluate as score


def evaluate(
    checkpoint: str,
    data: Sequence[str],
    *,
    trust_remote_code: bool,
    reward: str | None,
    temperature: float,
    num_samples: int,
    max_response_tokens: int | None,
    max_prompts: int | None,
    seed: int,
) -> None:
    """Print the mean score and the best and worst response."""
    console = Console(highlight=False)
    trained, began = find_trained(checkpoint, trust_remote_code=trust_remote_code), time.monotonic()
    result = score(
        trained,
        data,
        reward=reward,
        temperature=temperature,
        num_samples=num_samples,
        max_response_tokens=max_response_tokens,
        max_prompts=max_prompts,
        seed=seed,
        say=console.print,
    )
    seconds = time.monotonic() - began
    failed = f", {len(result.failures)} more without a score" if result.failures else ""
    console.print(
        f"[bold]score {result.mean:.4f}[/]  {len(result.scores)} responses to {result.num_prompts} prompts{failed}"
    )
    console.print(
        f"temperature {temperature:g}  {result.num_tokens:,} tokens  {result.num_truncated} truncated  {seconds:.1f} s"
    )
    for word, (example, response, value) in (("best", result.best), ("worst", result.worst)):
        prompt = example.prompt[-1].content
        console.print(f"{word:5} {value:.3f}  {escape(repr(prompt))} -> {escape(repr(response))}", soft_wrap=True)
    if result.failures:
        console.print(escape(describe_failures(result.failures)), soft_wrap=True)


def chat(checkpoint: str, *, trust_remote_code: bool, temperature: float, max_response_tokens: int, seed: int) -> None:
    """Read lines, print answers as they are sampled; an empty line begins anew, end of input ends."""
    console = Console(highlight=False)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is typed or piped in may be no text
    trained = find_trained(checkpoint, trust_remote_code=trust_remote_code)
    conversation = Conversation(trained, temperature=temperature, max_response_tokens=max_response_tokens, seed=seed)
    console.print("Empty line: a new conversation. Ctrl-D: end.", style="dim")
    while True:
        try:
            line = console.input("[bold]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not line:
            conversation.forget()
            continue
        try:
            with contextlib.closing(conversation.ask(line)) as answer:
                for piece in answer:
                    console.out(_printable(piece), end="")
        except KeyboardInterrupt:
            console.print(" ... forgotten, with its question", style="dim", end="")
        except ModelError as error:
            conversation.forget()
            console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
        console.print()


def export(checkpoint: str, to: str, *, trust_remote_code: bool, merge: bool | None) -> None:
    """Write a model or an adapter, and say what opens it."""
    folder = Path(to).expanduser().absolute()
    trained = find_trained(checkpoint, trust_remote_code=trust_remote_code)
    export_to(trained, folder, merge=merge)
    opens = "peft.PeftModel" if merge is False else "AutoModelForCausalLM"
    Console(highlight=False).print(f"{opens}.from_pretrained opens {escape(str(folder))}", soft_wrap=True)


def _printable(text: str) -> str:
    """Drop what would steer the terminal: a model's output is not trusted."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


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
