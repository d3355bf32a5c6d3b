"""How many files a prompt passes on the driver until an engine has it, and weights until the engines have them."""

import sys
import threading
from pathlib import Path

import pytest

import rallypoint

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "trainer.num_steps=2")
ROOT = f"{Path(rallypoint.__file__).parent}/"
MAX_FILES_OF_A_PROMPT = 10
"""Files of sampling, environments and roles that run for it, helpers included; docs/decisions/0032-the-journal.md."""
MAX_FILES_OF_WEIGHTS = 8


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Each call of a function of ours in a run, in order: its file, its name, and whether it is the driver's."""
    from tiny_runs import Runs

    found = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            is_drivers = threading.current_thread() is threading.main_thread()
            found.append((frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname, is_drivers))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        Runs(tmp_path_factory.mktemp("run")).run("run", *INLINE)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


ASKED = ("sampling/source.py", "RolloutSource.next_batch", True)


def files_between(calls, first, last, *folders):
    """The driver's files of some folders that run, once the first batch was asked for, from one function to another."""
    begin = calls.index(first, calls.index(ASKED))
    between = calls[begin : calls.index(last, begin) + 1]
    return {file for file, _, is_drivers in between if is_drivers and file.partition("/")[0] in folders}


def test_a_prompt_passes_few_files_until_an_engine_has_it(calls):
    taken = ("roles/rank_engine.py", "RankEngine.take", False)
    files = files_between(calls, ASKED, taken, "sampling", "environments", "roles")
    assert {"sampling/source.py", "sampling/in_flight.py", "sampling/client.py", "sampling/mailbox.py"} < files
    assert len(files) <= MAX_FILES_OF_A_PROMPT, "\n".join(sorted(files))


def test_published_weights_pass_at_most_eight_files_until_the_engines_have_them(calls):
    loaded = ("roles/rollout.py", "RolloutWorker.load", False)
    files = files_between(calls, ("roles/actor.py", "Actor.publish", True), loaded, "sampling", "roles", "weights")
    assert {"roles/actor.py", "roles/publishing.py", "sampling/mailbox.py", "roles/rollout.py"} < files
    assert len(files) <= MAX_FILES_OF_WEIGHTS, "\n".join(sorted(files))
