"""`rally eval`, `chat`, `export`, `serve`, `view` and the like: what is done with a run and its model.

What takes time to import is imported when a command runs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from rallypoint.errors import ModelError, ServingError
from rallypoint.extras import why_not

if TYPE_CHECKING:
    from rallypoint.recipes.evaluation import Evaluation
    from rallypoint.recipes.serve import Options
    from rallypoint.recipes.use import Asked, Trained


def _temperature(value: float) -> float:
    from rallypoint.config.limits import MIN_TEMPERATURE

    if 0 < value < MIN_TEMPERATURE:
        raise typer.BadParameter(f"expected 0 (greedy) or at least {MIN_TEMPERATURE:g}; logits are divided by it")
    return value


Temperature = Annotated[float, typer.Option(min=0.0, max=10.0, callback=_temperature, help="0 is greedy.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code from the model's folder.")]


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run folder, or any Hugging Face folder.")
    ],
    data: Annotated[list[str], typer.Argument(metavar="DATA", help="Parquet or jsonl files.")],
    reward: Annotated[
        str | None, typer.Option(help="file.py:function; by default the run's own, if it ships or you started the run.")
    ] = None,
    episode: Annotated[
        str | None, typer.Option(help="file.py:function of an episode or agent; by default the run's own; null: none.")
    ] = None,
    temperature: Temperature = 1.0,
    num_samples: Annotated[int, typer.Option(min=1, max=2**16, help="Responses, or episodes, per prompt.")] = 1,
    max_response_tokens: Annotated[int | None, typer.Option(min=1, help="By default as in training.")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use only this many prompts, the first ones.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Score a checkpoint on a data set."""
    from rallypoint.recipes.evaluation import evaluate as score
    from rallypoint.recipes.use import Asked, find_trained

    console = Console(highlight=False)
    trained, began = find_trained(checkpoint, trust_remote_code=trust_remote_code), time.monotonic()
    result = score(
        trained,
        data,
        reward=reward,
        asked=Asked(temperature, num_samples, max_response_tokens, seed),
        max_prompts=max_prompts,
        say=functools.partial(console.print, markup=False, soft_wrap=True),
        episode=episode,
    )
    _print_evaluation(console, result, f"temperature {temperature:g}", time.monotonic() - began)


def _print_evaluation(console: Console, result: Evaluation, how: str, seconds: float) -> None:
    from rallypoint.cli.rollouts import choose, print_chosen
    from rallypoint.environments.failures import describe_failures

    failed = f", {len(result.failures)} more without a score" if result.failures else ""
    failed += f", {len(result.failed)} more that failed" if result.failed else ""
    console.print(
        f"[bold]score {result.mean:.4f}[/]  {len(result.scores)} responses to {result.num_prompts} prompts{failed}"
    )
    console.print(f"{how}  {result.num_tokens:,} tokens  {result.num_truncated} truncated  {seconds:.1f} s")
    for line in _tabular(result.metrics):
        console.print(line, markup=False)
    if any(result.sampled.conversations):
        rows = result.rollouts()
        print_chosen(console, choose(rows, best=1, worst=1, failed=0))
    else:
        for word, (example, response, value) in (("best", result.best), ("worst", result.worst)):
            prompt = example.prompt[-1].content
            console.print(f"{word:5} {value:.3f}  {escape(repr(prompt))} -> {escape(repr(response))}", soft_wrap=True)
    for failures in filter(None, (result.failed, result.failures)):
        console.print(_printable(describe_failures(failures)), markup=False, soft_wrap=True)


def _tabular(metrics: Mapping[str, float]) -> list[str]:
    """Return a line for each metric that is not zero for want of failures.

    >>> _tabular({"validation/pass@1/sums": 0.5, "rollout/failed_timeout": 0.0})
    ['validation/pass@1/sums  0.5']
    """
    from rallypoint.display.text import clean

    shown = {name: value for name, value in metrics.items() if value or not name.startswith("rollout/failed_")}
    cells = max(map(len, shown), default=0)
    return [f"{clean(name):{cells}}  {value:.4g}" for name, value in sorted(shown.items())]


def chat(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run folder, or any Hugging Face folder.")
    ],
    temperature: Temperature = 0.0,
    max_response_tokens: Annotated[int | None, typer.Option(min=1, help="512, or as in training.")] = None,
    example: Annotated[
        str | None, typer.Option(help="Watch an episode on this example instead: its number, from 0, or `any` by seed.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Files with examples; by default the run's own.")] = None,
    episode: Annotated[
        str | None, typer.Option(help="file.py:function of the episode or agent; by default the run's own.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk to a checkpoint, or watch it in an episode."""
    from rallypoint.recipes.use import Asked, Conversation, find_trained

    # Lines are read, and answers printed as they are sampled; an empty line begins anew, the end of input ends.
    console = Console(highlight=False)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is typed or piped in may be no text
    trained = find_trained(checkpoint, trust_remote_code=trust_remote_code)
    if example is not None or data or episode is not None:
        asked = Asked(temperature, 1, max_response_tokens, seed)
        _watch(console, trained, data or (), _number_of(example or "any"), asked, episode)
        return
    conversation = Conversation(
        trained, temperature=temperature, max_response_tokens=max_response_tokens or 512, seed=seed
    )
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


def _number_of(example: str) -> int | None:
    if example != "any" and not example.isdecimal():
        raise typer.BadParameter(f"--example: expected a number from 0, or any, found {example}")
    return None if example == "any" else int(example)


def _watch(
    console: Console, trained: Trained, data: Sequence[str], place: int | None, asked: Asked, episode: str | None
) -> None:
    """Print an episode as it is played, and how it ended."""
    from rallypoint.cli.rollouts import print_outcome, print_turn
    from rallypoint.environments.failures import RolloutFailure, describe_failures
    from rallypoint.recipes.evaluation import Evaluation, watch
    from rallypoint.recipes.play import in_loop
    from rallypoint.run.step_rollouts import as_entries

    say = functools.partial(console.print, markup=False, soft_wrap=True)

    playing = watch(trained, data, place, asked=asked, say=say, episode=episode)

    async def print_all() -> None:
        num_shown = 0
        async for found in playing:
            if isinstance(found, Evaluation):
                print_outcome(console, found.rollouts()[0])
            elif isinstance(found, RolloutFailure):
                say(_printable(describe_failures([found])))
            else:
                for number, turn in enumerate(found[num_shown:], num_shown):
                    print_turn(console, number, as_entries(turn))
                num_shown = len(found)

    in_loop(print_all())


def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run folder, or an adapter.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="A new or empty folder.")],
    merge: Annotated[
        bool | None,
        typer.Option("--merge/--adapter", help="With LoRA: a whole model (the default), or the adapter alone."),
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload it to the Hugging Face hub; private if new.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a new repository is public.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a trained model as an ordinary Hugging Face folder, with a model card."""
    from rallypoint.recipes.export import export as export_to, push as push_to
    from rallypoint.recipes.use import find_trained

    folder = Path(to).expanduser().absolute()
    trained = find_trained(checkpoint, trust_remote_code=trust_remote_code)
    export_to(trained, folder, merge=merge)
    opens = "peft.PeftModel" if merge is False else "AutoModelForCausalLM"
    Console(highlight=False).print(f"{opens}.from_pretrained opens {escape(str(folder))}", soft_wrap=True)
    if push is not None:
        Console(highlight=False).print(escape(push_to(folder, push, public=public)), soft_wrap=True)


def import_verl(
    source: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint of verl's, such as global_step_40/actor.")],
    to: Annotated[str, typer.Argument(metavar="TO", help="A new or empty folder.")],
) -> None:
    """Write a checkpoint of verl's FSDP as an ordinary Hugging Face folder; no code of it runs."""
    from rallypoint.model_files.from_verl import import_verl as write

    folder = Path(to).expanduser().absolute()
    num_tensors = write(Path(source).expanduser(), folder)
    said = f"{num_tensors} tensors; AutoModelForCausalLM.from_pretrained opens {escape(str(folder))}"
    Console(highlight=False).print(said, soft_wrap=True)


def serve(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run folder, or any Hugging Face folder.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen at; another than this machine's own needs a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="RALLYPOINT_API_KEY", help="Callers must have it; may be given several times."),
    ] = None,
    max_concurrency: Annotated[
        int, typer.Option(min=1, max=65_536, help="Responses under way at once; beyond: 429.")
    ] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request; beyond: 413.")] = 4 * 2**20,
    max_logprobs: Annotated[
        int, typer.Option(min=0, help="Likeliest tokens of each place that prompt_logprobs may ask for; beyond: 400.")
    ] = 20,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="By default as in training, or float32.")
    ] = None,
    cache_tokens: Annotated[
        int,
        typer.Option(min=64, max=2**40, help="Prompts and responses at once; decides the memory for keys and values."),
    ] = 65_536,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="Bit-identical whatever else is in the batch, as rollout.exact; several times slower."
        ),
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Take over newer checkpoints of the run.")] = False,
    on_load: Annotated[
        Literal["keep", "recompute"],
        typer.Option(help="On new weights, keep the cached keys and values of running responses, or recompute them."),
    ] = "keep",
    grace_s: Annotated[float, typer.Option(min=0.0, help="Time for requests under way to end at a Ctrl-C.")] = 30.0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer over HTTP, as OpenAI's chat and completions API does."""
    try:
        from rallypoint.recipes.serve import Options
    except ImportError as error:
        raise ServingError(f"rally serve {why_not(error, ('starlette', 'uvicorn'), 'serve')}") from None
    options = Options(
        host=host,
        port=port,
        keys=tuple(api_key or ()),
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
    _serve(checkpoint, options, trust_remote_code=trust_remote_code)


def _serve(checkpoint: str, options: Options, *, trust_remote_code: bool) -> None:
    """Serve until Ctrl-C or SIGTERM; a second one cancels the requests that still run."""
    from rallypoint.recipes.serve import Serving
    from rallypoint.recipes.use import find_trained

    console = Console(highlight=False, markup=False, soft_wrap=True)
    events: SimpleQueue[str] = SimpleQueue()  # unlike a lock, safe in a signal handler
    trained = find_trained(checkpoint, trust_remote_code=trust_remote_code)
    with Serving(trained, options, say=console.print, on_end=lambda: events.put("ended")) as serving:
        _on_signals(lambda number: events.put(signal.Signals(number).name))
        console.print(serving.describe())
        event = events.get()
        if event == "ended":
            raise ServingError(serving.failure or "the server has ended by itself; what is printed above says why")
        console.print(f"{event}: {serving.num_running} responses under way have {options.grace_s:g} s to end")
        _on_signals(lambda _: serving.give_up())


def view(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Folders or names of runs; by default the newest run.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the page into one file that opens from a mail.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; another than this machine's own needs a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8765,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="RALLYPOINT_API_KEY", help="Whoever looks must have it: /?key=KEY.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Write these steps as a trace for ui.perfetto.dev instead.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="With --trace: by default trace-FIRST-LAST.json, here.")
    ] = None,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="With --trace: send spans to a collector of OpenTelemetry.")
    ] = None,
) -> None:
    """Show runs in a browser, also while they go on, or write them into one file."""
    from rallypoint.cli.runs import runs_of, write_trace

    if trace is not None:
        write_trace(names or [], trace, out, otlp)
        return
    if out is not None or otlp is not None:
        raise typer.BadParameter(
            "they say where a trace goes: give its steps, --trace FIRST:LAST", param_hint="--out, --otlp"
        )
    from rallypoint.page import RunReader, write_report

    console = Console(highlight=False, markup=False, soft_wrap=True)
    runs, keys = RunReader.several(runs_of(names or [])), tuple(api_key or ())
    if export is not None:
        said = write_report(runs, Path(export))
        console.print(f"{export}: {Path(export).stat().st_size / 1e6:.1f} MB; {said}")
        return
    try:
        from rallypoint.page.app import PageServer
    except ImportError as error:
        raise ServingError(f"rally view {why_not(error, ('starlette', 'uvicorn'), 'serve')}") from None
    events: SimpleQueue[str] = SimpleQueue()  # unlike a lock, safe in a signal handler
    server = PageServer(runs, host=host, port=port, keys=keys, say=console.print, on_end=lambda: events.put("ended"))
    with server:
        _on_signals(lambda number: events.put(signal.Signals(number).name))
        console.print(f"{', '.join(run.name for run in runs)}: {server.url}{'?key=KEY' if keys else ''}  (Ctrl-C ends)")
        if events.get() == "ended":
            raise ServingError("the server has ended by itself; what is printed above says why")


def _printable(text: str) -> str:
    """Drop what would steer the terminal: a model's output is not trusted."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


def _on_signals(do: Callable[[int], None]) -> None:
    """Call `do` when an end is asked for; previous handlers are lost."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: do(number))
