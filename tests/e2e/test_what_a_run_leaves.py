"""After a run, however it ended, its process has the threads, descriptors, handlers and settings of before."""

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from forks import run_forked
from tiny_models import make_tiny_model

import rallypoint as rally

ROWS = [{"prompt": f"{number:04d}", "answer": str(number)} for number in range(8)]
WAYS = {
    "finished": None,
    "failed in a worker": "TooManyFailuresError",
    "failed in the config": "ConfigError",
    "a callback raised": "LookupError",
    "Ctrl-C": None,
    "SIGTERM": None,
    "SIGHUP": None,
    "Ctrl-C twice": "KeyboardInterrupt",
    "failed in a worker on Ray": "TooManyFailuresError",
    "a callback raised on Ray": "LookupError",
    "Ctrl-C on Ray": None,
    "SIGTERM on Ray": None,
    "finished on Ray": None,
}
ON_RAY = [way for way in WAYS if way.endswith("on Ray")]
SELDOM = ["a callback raised on Ray", "Ctrl-C on Ray", "SIGTERM on Ray", "finished on Ray"]
"""Those that differ only in what the driver does, for which a run in one process stands, and one that failed on Ray."""
INLINE = [way for way in WAYS if way not in ON_RAY]


OF_RAY = re.compile(r"^(socket|anon_inode):|/logs/ray/")
"""What Ray's C++ keeps open in its driver until that ends."""


def state(way="finished"):
    """Return what a run could leave in this process; what its ends close may take a moment."""
    gc.collect()
    return {
        "threads": {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")},
        "descriptors": _descriptors(way),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.gettrace(), sys.getprofile()),
        "folder and path": (os.getcwd(), list(sys.path)),
        "interval": sys.getswitchinterval(),
        "torch": (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.get_float32_matmul_precision(),
            torch.random.get_rng_state().tolist(),
        ),
    }


def _descriptors(way):
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {number: what for number, what in found.items() if way not in ON_RAY or not OF_RAY.search(what)}


def callback(way):
    way = way.removesuffix(" on Ray")
    numbers = {
        "Ctrl-C": [signal.SIGINT],
        "SIGTERM": [signal.SIGTERM],
        "SIGHUP": [signal.SIGHUP],
        "Ctrl-C twice": [signal.SIGINT] * 2,
    }

    def after(step):
        if way == "a callback raised":
            raise LookupError
        for number in numbers.get(way, []) if step.number == 1 else []:
            signal.raise_signal(number)

    return after


def start(way, model, folder):
    """Run, and return the name of the error that came of it."""

    def reward(completion, answer):
        return float(len(completion))

    def broken(completion, answer):
        raise ValueError("broken")

    keys = {"cluster.runtime": "ray" if way in ON_RAY else "inline", "data.max_prompt_tokens": 16}
    try:
        rally.train(
            "grpo",
            model=model,
            data=ROWS,
            reward=broken if way.startswith("failed in a worker") else reward,
            callbacks=callback(way),
            config=keys | ({"kl.coef": -1} if way == "failed in the config" else {}),
            num_steps=2,
            num_prompts=2,
            group_size=2,
            max_response_tokens=4,
            runs_dir=folder / "runs",
            name=way.replace(" ", "-"),
            display=False,
        )
    except BaseException as error:  # noqa: BLE001 - it is what the test is about
        return type(error).__name__
    return None


@pytest.fixture(scope="module")
def model(tmp_path_factory, pictures):
    """A model, once a run has imported everything."""
    folder = tmp_path_factory.mktemp("first")
    made = make_tiny_model(folder / "model")
    start("finished", made, folder)
    return made


def trace(*_):
    return trace


def differences(way, run):
    """Run, and return what of this process is not as before; what is traced afterwards runs on."""
    before = state(way)
    run()
    sys.settrace(trace)
    callback(way)
    sys.settrace(None)
    deadline = time.monotonic() + 60  # a thread that was told to end does so soon
    while (after := state(way)) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return {name: (before[name], after[name]) for name in after if after[name] != before[name]}


@pytest.mark.parametrize(
    ("way", "in_thread"), [*((way, False) for way in INLINE), ("finished", True), ("failed in a worker", True)]
)
def test_after_a_run_the_process_is_as_before(model, tmp_path, way, in_thread):
    ended = []

    def run():
        ended.append(start(way, model, tmp_path))

    def run_in_thread():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    assert differences(way, run_in_thread if in_thread else run) == {}
    assert ended == [WAYS[way]]


def test_after_two_runs_at_once_the_process_is_as_before(model, tmp_path):
    def run():
        folders = [tmp_path / name for name in "ab"]
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda folder: start("finished", model, folder), folders)) == [None, None]

    assert differences("finished", run) == {}


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "ways", [[way for way in ON_RAY if way not in SELDOM], pytest.param(SELDOM, marks=pytest.mark.slow)]
)
def test_after_runs_on_ray_the_process_is_as_before(model, tmp_path, ways):
    """In a process of its own: another test's Ray closes its files whenever the next one starts."""
    pytest.importorskip("rallypoint.cluster.ray_runtime")
    program = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    done = run_forked("-c", program, str(model), str(tmp_path), *ways)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-len(ways) :] == [f"{WAYS[way]} {{}}" for way in ways]


if __name__ == "__main__":
    made, place = sys.argv[1], Path(sys.argv[2])
    importlib.import_module("rallypoint.cluster.ray_runtime")  # with ray, whose import adds to sys.path
    start("finished", made, place)  # which imports the rest
    for way in sys.argv[3:]:
        ended = []
        found = differences(way, lambda way=way, ended=ended: ended.append(start(way, made, place)))
        print(*ended, found)
