"""However a block ends, all its endings are done, and the first error is the one that is told."""

import asyncio
import functools

import pytest
from planted_runs import planted_run

from rallypoint.page import write_report
from rallypoint.recipes import ending
from rallypoint.recipes.ending import Endings, reported
from rallypoint.run.folder import RunFolder


def run_endings(*, fails=(), in_block=None):
    """Return what was done, what was said, and the error that came of it; each letter of `fails` raises."""
    done, said = [], []

    def ending(name):
        async def end():
            await asyncio.sleep(0)
            done.append(name)
            if name in fails:
                raise LookupError(name)

        return end

    async def main():
        async with Endings(said.append) as at_end:
            log, endpoint, runtime = ending("log"), ending("endpoint"), ending("runtime")
            at_end.add(log)
            at_end.add(endpoint)
            at_end.add(runtime, after=endpoint)
            at_end.add(ending("rendezvous"), after=runtime)
            at_end.add(lambda: done.append("plain"))
            if in_block is not None:
                raise in_block

    try:
        asyncio.run(main())
    except BaseException as error:  # noqa: BLE001 - it is what the test is about
        return done, said, error
    return done, said, None


ALL = ["plain", "endpoint", "runtime", "rendezvous", "log"]


def test_endings_are_done_in_their_order():
    assert run_endings() == (ALL, [], None)


def test_one_that_raises_keeps_none_of_the_others_and_the_first_error_is_raised():
    done, said, error = run_endings(fails=("runtime", "log"))
    assert done == ALL
    assert (type(error), str(error)) == (LookupError, "runtime")
    assert said == ["and while the run ended: LookupError: log"]


@pytest.mark.parametrize("what", [ValueError("of the run"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_the_error_of_the_block_goes_before_those_of_endings(what):
    done, said, error = run_endings(fails=("endpoint",), in_block=what)
    assert done == ALL
    assert type(error) is type(what)
    assert said == ["and while the run ended: LookupError: endpoint"]


@pytest.mark.parametrize("in_block", [None, ValueError("of the run")])
def test_what_does_not_wait_ends_in_the_same_way_without_a_loop(in_block):
    said, done = [], []

    def fail(name):
        done.append(name)
        raise LookupError(name)

    def end():
        with Endings(said.append) as at_end:
            for name in ("log", "curve", "trackers"):
                at_end.add(functools.partial(fail, name))
            if in_block:
                raise in_block

    with pytest.raises(type(in_block) if in_block else LookupError) as raised:
        end()
    assert done == ["trackers", "curve", "log"]
    told = [str(raised.value), *(line.rpartition(" ")[2] for line in said)]
    assert told == (["of the run"] if in_block else []) + done


def test_endings_are_done_also_if_nothing_can_be_said():
    done = []

    def fail():
        raise LookupError

    def say(line):
        raise OSError(28, line)

    async def main():
        async with Endings(say) as at_end:
            for ending in (lambda: done.append(1), fail, fail):
                at_end.add(ending)

    with pytest.raises(LookupError):
        asyncio.run(main())
    assert done == [1]


def test_a_start_that_gives_way_to_another_process_leaves_its_report_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "write_report", write_report)
    run = RunFolder(planted_run(tmp_path, num_steps=1, prompts=2, group=2))
    run.metrics.write_text("{}\n")
    run.report.write_text("theirs")
    with run.locked(), reported(run):
        pass
    assert run.report.read_text() == "theirs"
    with reported(run):
        pass
    assert 'id="data"' in run.report.read_text()
