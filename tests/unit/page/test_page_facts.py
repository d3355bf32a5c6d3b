"""What the page says of runs with a known fault leads to it; damaged, killed and unfinished runs open as well."""

import json
from typing import Any

import pytest
from planted_runs import HOSTILE, HOT_FROM, SLOW_RANK, planted_run
from starlette.testclient import TestClient

from rallypoint.errors import ServingError
from rallypoint.journal import Journal, StepDone
from rallypoint.page import RunReader, write_report
from rallypoint.page.answers import answer, to_json
from rallypoint.page.app import PageServer, make_page
from rallypoint.page.report import MAX_BYTES
from rallypoint.serving import Access

SHAPE: dict[str, Any] = {"prompts": 4, "group": 4}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Readers of the runs by their fault."""
    folder = tmp_path_factory.mktemp("planted")
    kinds = {"hot": 80, "straggler": 12, "empty": 48, "impossible": 12, "agent": 3, "sound": 12}
    return {
        kind: RunReader(planted_run(folder, kind, num_steps=num, last="finished", **SHAPE))
        for kind, num in kinds.items()
    }


def asked(run, panel, **words):
    return answer([run], panel, {key: str(value) for key, value in words.items()})


def rule(run, name):
    return next(one for one in asked(run, "health")["rules"] if one["name"] == name)


def bad(rule, level="bad"):
    return sorted(int(step) for step, found in rule["levels"].items() if found == level)


def test_a_learning_rate_that_is_too_high_is_found_at_its_step_with_the_key_to_turn(planted):
    kl = rule(planted["hot"], "actor/approx_kl")
    assert bad(kl)[0] == HOT_FROM
    assert "actor.optimizer.lr" in kl["advice"]
    fell = [one for one in asked(planted["hot"], "troubles")["troubles"] if one["level"] == "bad"]
    assert any(HOT_FROM - 10 <= (one["first"] or 0) <= HOT_FROM + 10 for one in fell)
    lr = asked(planted["hot"], "series", names="actor/lr")
    column = dict(zip(lr["steps"], lr["columns"]["actor/lr"], strict=True))
    assert column[HOT_FROM] == pytest.approx(10 * column[HOT_FROM - 1])


def test_a_straggler_is_named_with_its_process_and_stands_out_on_the_time_axis(planted):
    found = asked(planted["straggler"], "time")
    assert found["slow_ranks"] == [{"rank": SLOW_RANK, "steps": 12, "of": 12}]
    assert found["processes"]["rollout"][SLOW_RANK] == "4702@node1"
    lanes = {lane["name"]: lane["bars"] for lane in asked(planted["straggler"], "timeline", step=5)["lanes"]}
    longest = max((name for name in lanes if name != "driver"), key=lambda name: lanes[name][-1]["to"])
    assert longest == f"rollout {SLOW_RANK}"
    assert [bar["name"] for bar in lanes["driver"]] == ["rollout", "judge", "learn", "publish"]
    assert asked(planted["sound"], "time")["slow_ranks"] == []


def test_a_reward_that_pays_the_empty_answer_is_seen_in_the_rollouts_that_score_best(planted):
    run = planted["empty"]
    assert bad(rule(run, "actor/entropy")) == []
    assert "reward/std" in {one["name"] for one in asked(run, "health")["rules"]}
    empty = asked(run, "rollouts", step=30, only="empty", limit=100)
    assert empty["found"] > 8
    assert {(row["response"], row["score"]) for row in empty["rows"]} == {("", 1.0)}
    assert asked(run, "rollouts", step=30, sort="-score", limit=1)["rows"][0]["score"] == 1.0
    lengths = asked(run, "series", names="rollout/response_length")["columns"]["rollout/response_length"]
    assert lengths[-1] < 0.2 * lengths[1]


def test_prompts_that_are_impossible_are_the_groups_without_signal(planted):
    run = planted["impossible"]
    assert bad(rule(run, "actor/without_signal"), "watch")
    lost = asked(run, "rollouts", step=12, only="no signal", limit=100)["rows"]
    assert {"train:1", "train:3"} <= {row["name"] for row in lost if row["score"] == 0.0}
    followed = asked(run, "prompt", name="train:1")["steps"]
    assert [one["step"] for one in followed] == list(range(1, 13))
    assert {score for one in followed for score in one["scores"]} == {0.0}


def test_a_rollout_is_shown_token_by_token_with_the_reason_why_one_is_not_trained(planted):
    rows = asked(planted["sound"], "rollouts", step=3, only="trained")["rows"]
    one = asked(planted["sound"], "rollout", step=3, place=rows[0]["place"])
    assert "".join(one["pieces"])[:-1] == one["response"]
    assert (
        len(one["pieces"]) == len(one["advantages"]) == len(one["ratio"]) == len(one["difference"]) == len(one["why"])
    )
    assert set(one["why"]) == {0}
    group = asked(planted["sound"], "group", step=3, prompt=rows[0]["prompt_index"])
    assert [row["sample_index"] for row in group["rows"]] == [0, 1, 2, 3]
    lost = asked(planted["impossible"], "rollouts", step=3, only="no signal")["rows"][0]
    found = asked(planted["impossible"], "rollout", step=3, place=lost["place"])
    assert {found["reasons"][why] for why in found["why"]} == {
        "group without signal: all its scores are equal, so every advantage is 0"
    }


def test_what_a_tool_said_and_what_a_correction_masks_is_not_trained_and_says_so(planted):
    run = planted["agent"]
    row = asked(run, "rollouts", step=3, only="trained")["rows"][0]
    one = asked(run, "rollout", step=3, place=row["place"])
    by_reason = {one["reasons"][why].partition(":")[0]: one["why"].count(why) for why in set(one["why"])}
    assert by_reason["context"] == 4
    assert by_reason["masked by correction mask"] > 0
    assert [turn["said"][0]["role"] for turn in one["turns"]] == ["user", "tool"]
    assert one["metrics"] == {"moves": 2.0}


def test_rollouts_are_searched_filtered_sorted_and_paged(planted):
    run = planted["sound"]
    scores = [row["score"] for row in asked(run, "rollouts", step=2, sort="-score", limit=100)["rows"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 16
    page = asked(run, "rollouts", step=2, offset=5, limit=3)
    assert [row["place"] for row in page["rows"]] == [5, 6, 7]
    assert {row["name"] for row in asked(run, "rollouts", step=2, search="TRAIN:2")["rows"]} == {"train:2"}
    assert asked(run, "rollouts", step=2, only="failed")["found"] == 0


def test_two_runs_are_compared_down_to_the_first_event_that_differs(planted):
    found = answer([planted["sound"], planted["empty"]], "compare", {"with": "empty"})
    assert {one["key"] for one in found["free"]} >= {"trainer.name"}
    assert found["first"]["step"] == 1


def test_more_steps_than_points_keep_their_extremes(planted):
    whole = asked(planted["hot"], "series", names="actor/approx_kl")["columns"]["actor/approx_kl"][1:]
    few = asked(planted["hot"], "series", names="actor/approx_kl", points=10)
    assert len(few["steps"]) == len(few["columns"]["actor/approx_kl"]) <= 12
    assert {max(whole), min(whole)} <= set(few["columns"]["actor/approx_kl"])


def test_provenance_names_the_keys_that_are_not_at_their_default(planted):
    keys = {one["key"]: one for one in asked(planted["sound"], "provenance")["config"]}
    assert keys["rollout.group_size"]["changed"]
    assert not keys["seed"]["changed"]


def test_the_batch_is_counted_from_prompts_to_micro_batches(planted):
    found = asked(planted["sound"], "batch")
    assert (found["num_prompts"], found["group_size"], found["num_rows"]) == (4, 4, 16)
    assert found["learners"][0]["role"] == "actor"


def test_a_killed_run_a_growing_one_and_a_damaged_one_open(tmp_path):
    path = planted_run(tmp_path, num_steps=3, **SHAPE)
    run = RunReader(path)
    assert asked(run, "summary")["state"] == "killed"
    assert asked(run, "broke")["starts"][0]["how"] == "killed"
    with Journal(path / "journal.jsonl") as journal:
        journal.append(StepDone(step=4, metrics={"reward/mean": float("nan")}, digests={}, seconds=1.0))
        with (path / "journal.jsonl").open("ab") as file:
            file.write(b'{"n": 99, "torn')
        assert run.refresh()
        assert asked(run, "summary")["step"] == 4
    assert json.loads(to_json(asked(run, "series", names="reward/mean")))["columns"]["reward/mean"][-1] is None
    assert not run.refresh()
    (path / "rollouts/step_000002.parquet").write_bytes(b"no parquet")
    lines = (path / "journal.jsonl").read_bytes().split(b"\n")
    damaged = next(place for place, line in enumerate(lines) if b'"StepDone", "step": 3' in line)
    lines[damaged] = lines[damaged].replace(b'"step": 3', b'"stop": 3')
    (path / "journal.jsonl").write_bytes(b"\n".join(lines))
    client = TestClient(make_page([RunReader(path)], Access(keys=(), hosts=("testserver",), max_body_bytes=1)))
    assert "line" in client.get("/api/broke").json()["damage"]
    assert client.get("/api/summary").json()["step"] == 2
    assert "cannot be read" in client.get("/api/rollouts?step=2").json()["error"]
    assert client.get("/api/rollouts?step=1").json()["total"] == 16


def test_prometheus_reads_the_newest_numbers_of_each_run(planted):
    runs = [planted["sound"], planted["empty"]]
    told = TestClient(make_page(runs, Access(keys=(), hosts=("testserver",), max_body_bytes=1))).get("/metrics")
    lines = told.text.splitlines()
    assert [line for line in lines if line.startswith("rallypoint_step{")] == [
        'rallypoint_step{run="sound"} 12',
        'rallypoint_step{run="empty"} 48',
    ]
    assert 'rallypoint_actor_lr{run="empty",name="actor/lr"} 1e-06' in lines
    typed = [line for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))


def test_who_may_look_and_what_the_browser_may_load(tmp_path):
    run = RunReader(planted_run(tmp_path, num_steps=1, **SHAPE))
    open_to_all = TestClient(make_page([run], Access(keys=(), hosts=("testserver",), max_body_bytes=1)))
    page = open_to_all.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text
    assert (
        open_to_all.get("/static/page.js").status_code
        == open_to_all.get("/static/vendor/uPlot.LICENSE").status_code
        == 200
    )
    assert 'rallypoint_reward_mean{run="sound"' in open_to_all.get("/metrics").text
    assert open_to_all.get("/", headers={"host": "elsewhere.example"}).status_code == 403
    assert open_to_all.get("/api/rollouts?step=x").status_code == 400
    assert open_to_all.get("/api/nothing").status_code == open_to_all.get("/api/summary?run=other").status_code == 404
    guarded = TestClient(make_page([run], Access(keys=("s3cret",), hosts=(), max_body_bytes=1)))
    assert guarded.get("/").status_code == guarded.get("/api/summary").status_code == 401
    assert guarded.get("/?key=wrong").status_code == 401
    assert guarded.get("/?key=s3cret").status_code == 200  # a redirect, and a cookie
    assert guarded.get("/api/summary").json()["name"] == "sound"
    with pytest.raises(ServingError, match="a key is needed"):
        PageServer([run], host="0.0.0.0")


def test_a_report_is_one_small_file_in_which_no_text_of_a_run_can_end_the_data(tmp_path):
    run = RunReader(planted_run(tmp_path, num_steps=30, last="finished", texts=HOSTILE, **SHAPE))
    said = write_report([run], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert len(html.encode()) <= MAX_BYTES
    assert "rollouts of" in said
    assert "of 30 steps" in said
    block = html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert json.loads(block)["runs"] == {"runs": ["sound"]}
    assert html.count("</script>") == 2
    assert "src=" not in html.split('id="data"')[0].replace("src 'sha", "")
    assert "connect-src" not in html
