"""A trace has the format that Perfetto reads, and what it draws is where and when the journal says."""

import http.server
import itertools
import json
import threading
from collections import defaultdict

import pytest
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.errors import ExportError, RunFolderError
from rallypoint.journal import (
    BatchTaken,
    Entry,
    GroupScored,
    Journal,
    RoleLost,
    RolesStarted,
    RunBegan,
    StepDone,
    Validated,
    WeightsLoaded,
    WeightsPublished,
)
from rallypoint.run.trace import trace

BEGAN = RunBegan(first=0, config={}, software={}, machine="")
STARTED = RolesStarted(step=0, metrics={}, processes={"actor": ["7@a", "8@b"], "rollout": ["9@a"]})
ORIGIN_S = 1000.0


def scored(prompt, admitted, sampled, at):
    turns = [(0, 0, [(0, 5)], "d"), (1, 0, [(0, 7)], "d")]
    return GroupScored(prompt=prompt, rank=0, admitted_s=admitted, sampled_s=sampled, scored_s=at, turns=turns)


def done(step, **changes):
    """Return a step of ten seconds that begins every twelve."""
    began = ORIGIN_S + 12.0 * (step - 1)
    work = [("logprobs", began + 5.0, began + 6.0, 1.0, 1), ("train", began + 6.5, began + 9.0, 2.5, 2)]
    named = {
        "metrics": {
            "reward/mean": 0.5,
            "actor/memory_gib": 1.5,
            "time_s/rollout": 5.0,
            "time_s/learn": 3.0,
            "time_s/learn/critic": 2.0,
            "time_s/learn/actor": 3.0,
        },
        "begins": {"rollout": 0.0, "learn": 6.0, "learn/critic": 6.0, "learn/actor": 6.0},
        "work": {"actor": [work, work], "rollout": [[("sample", began - 0.5, began + 5.0, 5.0, 1)]]},
    }
    return StepDone(step=step, digests={}, seconds=10.0, **({"began_s": began} | named | changes))


STEPS = [
    (990.0, BEGAN),
    (995.0, STARTED),
    (1003.1, scored(0, 10.0, 12.0, 13.1)),
    (1004.1, scored(1, 11.0, 13.5, 14.1)),
    (1005.0, BatchTaken(step=1, prompts=(0, 1), asked_s=10.0, taken_s=15.0, loaded_s=9.0, busy_s=(5.0,))),
    (1009.0, WeightsPublished(version=1, digest="a")),
    (1009.5, WeightsLoaded(version=1, num_ranks=1)),
    (1010.5, done(1)),
    (1011.5, Validated(step=1, metrics={"time_s/validate": 0.5})),
    (1020.0, RoleLost(role="rollout", rank=0, step=2, why="gone")),
    (1022.5, done(2)),
    (1034.5, done(3)),
]


def entries(pairs=STEPS):
    return [Entry(number, at, event) for number, (at, event) in enumerate(pairs, start=1)]


def write_journal(folder):
    times = iter([at for at, _ in STEPS])
    with Journal(folder / "journal.jsonl", clock=lambda: next(times)) as journal:
        journal.append(*(event for _, event in STEPS))


@pytest.fixture(scope="module")
def events():
    return trace(entries(), range(1, 3))["traceEvents"]


def slices(events):
    """Return what each thread drew, by its process's and its own name: name, seconds of begin and end."""
    names = {(one["name"], one["pid"], one["tid"]): one["args"].get("name") for one in events if one["ph"] == "M"}
    found = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            where = names["process_name", one["pid"], 0], names["thread_name", one["pid"], one["tid"]]
            found[where].append((one["name"], one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6))
    return dict(found)


def test_every_event_has_what_the_format_requires(events):
    assert json.loads(json.dumps(events, allow_nan=False)) == events
    for one in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= one.keys()
        assert one["ph"] in "XMCisf"
        assert isinstance(one["ts"], int)
        assert one["ts"] >= 0
        assert one["ph"] != "X" or one["dur"] >= 0
    starts, ends = ([one["id"] for one in events if one["ph"] == phase] for phase in "sf")
    assert starts == ends == [1]


def test_nothing_overlaps_in_a_thread(events):
    for where, drawn in slices(events).items():
        for (_, _, end), (_, begin, _) in itertools.pairwise(drawn):
            assert end <= begin, where


def test_each_role_is_a_process_and_each_rank_a_thread_with_what_it_did(events):
    found = slices(events)
    assert found["driver", "steps"] == [("step 1", 0.0, 10.0), ("step 2", 12.0, 22.0)]
    assert found["driver", "phases"][:2] == [("rollout", 0.0, 5.0), ("learn", 6.0, 9.0)]
    assert found["driver", "learn"] == [("learn/actor", 6.0, 9.0), ("learn/actor", 18.0, 21.0)]
    assert found["driver", "learn (2)"][0] == ("learn/critic", 6.0, 8.0)
    for rank, place in enumerate(("7@a", "8@b")):
        assert found["actor", f"rank {rank} ({place})"][:2] == [("logprobs", 5.0, 6.0), ("train", 6.5, 9.0)]
    assert found["rollout", "rank 0 (9@a)"][0] == ("sample", 0.0, 5.0)
    assert found["rollout groups", "rank 0"] == [("group 0", 0.0, 3.1)]
    assert found["rollout groups", "rank 0 (2)"] == [("group 1", 1.0, 4.1)]
    assert found["driver", "between"] == [("validate", 11.0, 11.5)]
    assert found["actor", "weights"][0][:2] == ("publish version 1", 9.0)


def test_curves_and_losses_are_drawn(events):
    counted = {(one["name"], one["ts"]): one["args"] for one in events if one["ph"] == "C"}
    assert counted["reward/mean", 10_500_000] == {"reward/mean": 0.5}
    assert counted["actor/memory_gib", 22_500_000] == {"actor/memory_gib": 1.5}
    assert [one["name"] for one in events if one["ph"] == "i"] == ["lost rollout rank 0"]


def test_phases_of_an_older_journal_follow_one_another():
    old = done(1, begins={}, work={})
    found = slices(trace(entries([(990.0, BEGAN), (1010.0, old)]), range(1, 2))["traceEvents"])
    assert found["driver", "phases"] == [("rollout", 0.0, 5.0), ("learn", 5.0, 8.0)]


def test_a_step_that_was_done_again_is_drawn_as_it_counts():
    again = [(at + 100.0, event) for at, event in STEPS[:2]]
    repeated = (1110.5, done(1, began_s=1100.0, work={}))
    found = slices(trace(entries([*STEPS, *again, repeated]), range(1, 2))["traceEvents"])
    assert found["driver", "steps"] == [("step 1", 0.0, 10.0)]
    assert ("actor", "rank 0 (7@a)") not in found


def test_steps_that_are_not_there_are_refused_with_those_that_are():
    with pytest.raises(RunFolderError, match="no step from 7 to 9 is done; expected some of steps 1 to 3"):
        trace(entries(), range(7, 10))


@pytest.mark.parametrize("steps", ["2:1", "0:3", "a", "1:2:3", "-1"])
def test_the_command_refuses_what_is_no_range_of_steps(steps, tmp_path):
    result = CliRunner().invoke(app, ["view", str(tmp_path), f"--trace={steps}"])
    assert isinstance(result.exception, RunFolderError)
    assert "expected steps as FIRST:LAST" in str(result.exception)


def test_the_command_writes_a_file(tmp_path):
    write_journal(tmp_path)
    out = tmp_path / "t.json"
    result = CliRunner().invoke(app, ["view", str(tmp_path), "--trace", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert any(one["name"] == "step 2" for one in json.loads(out.read_text())["traceEvents"])


@pytest.fixture
def collector():
    """A collector of OpenTelemetry's, as far as it takes spans: its address, and what it was sent."""
    taken = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()
        thread.join()


def test_a_collector_is_sent_each_step_as_a_trace_whose_root_is_the_step(tmp_path, collector):
    url, taken = collector
    write_journal(tmp_path)
    for _ in range(2):
        result = CliRunner().invoke(app, ["view", str(tmp_path), "--trace", "1:2", "--otlp", url])
        assert result.exit_code == 0, result.output
    (path, kind, sent), again = taken
    assert (path, kind) == ("/v1/traces", "application/json")
    assert again == (path, kind, sent)
    (of_run,) = sent["resourceSpans"]
    assert {"key": "rallypoint.run", "value": {"stringValue": tmp_path.name}} in of_run["resource"]["attributes"]
    spans = of_run["scopeSpans"][0]["spans"]
    roots = {span["spanId"]: span for span in spans if "parentSpanId" not in span}
    assert [root["name"] for root in roots.values()] == ["step 1", "step 2"]
    assert len({root["traceId"] for root in roots.values()}) == 2
    assert len({span["spanId"] for span in spans}) == len(spans)
    for span in spans:
        assert len(span["traceId"]) == 32
        assert len(span["spanId"]) == 16
        assert int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"]) >= ORIGIN_S * 1e9
        assert span["traceId"] == roots[span.get("parentSpanId", span["spanId"])]["traceId"]
    train = next(span for span in spans if span["name"] == "train")
    assert {"key": "calls", "value": {"intValue": "2"}} in train["attributes"]
    assert {"key": "seconds", "value": {"doubleValue": 2.5}} in train["attributes"]


def test_a_collector_that_is_not_there_is_named_with_what_was_expected(tmp_path):
    write_journal(tmp_path)
    result = CliRunner().invoke(app, ["view", str(tmp_path), "--trace", "1", "--otlp", "http://127.0.0.1:9"])
    assert isinstance(result.exception, ExportError)
    assert "http://127.0.0.1:9/v1/traces: the spans were not taken" in str(result.exception)


@pytest.mark.parametrize("option", ["--out", "--otlp"])
def test_where_a_trace_goes_is_an_error_without_its_steps(option, tmp_path):
    result = CliRunner().invoke(app, ["view", str(tmp_path), option, "there"])
    assert result.exit_code == 2
    assert "--trace FIRST:LAST" in " ".join(result.output.replace("│", " ").split())
