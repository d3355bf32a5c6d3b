"""What the page says of runs with a known fault leads to it; damaged, killed and unfinished runs open as well."""

import json
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted_runs import HOSTILE, HOT_FROM, SLOW_RANK, TRACEBACK, planted_run
from starlette.testclient import TestClient

from rallypoint.config import load_config, values_of
from rallypoint.errors import RunFolderError, ServingError
from rallypoint.journal import BatchTaken, Journal, RunBegan, StepDone, Validated, read_journal
from rallypoint.page import RunReader, timing, write_report
from rallypoint.page.answers import answer, to_json
from rallypoint.page.app import PageServer, make_page
from rallypoint.page.report import MAX_BYTES
from rallypoint.run.folder import create_run
from rallypoint.run.waste import account
from rallypoint.serving import Access

SHAPE: dict[str, Any] = {"prompts": 4, "group": 4}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Readers of the runs by their fault."""
    folder = tmp_path_factory.mktemp("planted")
    kinds = {"hot": 80, "straggler": 12, "empty": 48, "impossible": 12, "agent": 3, "broken": 4, "sound": 12}
    return {
        kind: RunReader(planted_run(folder, kind, num_steps=num, last="finished", **SHAPE))
        for kind, num in kinds.items()
    }


def asked(run, panel, **words):
    return answer([run], panel, {key: str(value) for key, value in words.items()})


def rule(run, name):
    return next(one for one in asked(run, "health")["rules"] if one["name"] == name)


def bad(rule, level="bad"):
    return [step for first, last, found in rule["levels"] if found == level for step in range(first, last + 1)]


def curve(run, name, **words):
    return asked(run, "series", names=name, **words)["curves"][name]


def test_a_learning_rate_that_is_too_high_is_found_at_its_step_with_the_key_to_turn(planted):
    kl = rule(planted["hot"], "actor/approx_kl")
    assert bad(kl)[0] == HOT_FROM
    assert "actor.optimizer.lr" in kl["advice"]
    fell = [one for one in asked(planted["hot"], "troubles")["troubles"] if one["level"] == "bad"]
    assert any(HOT_FROM - 10 <= (one["first"] or 0) <= HOT_FROM + 10 for one in fell)
    column = dict(zip(*curve(planted["hot"], "actor/lr"), strict=True))
    assert column[HOT_FROM] == pytest.approx(10 * column[HOT_FROM - 1])


def test_a_straggler_is_named_with_its_process_and_stands_out_on_the_time_axis(planted):
    found = asked(planted["straggler"], "time")
    assert found["slow_ranks"] == [{"rank": SLOW_RANK, "steps": 12, "of": 12}]
    assert found["processes"]["rollout"][SLOW_RANK] == "4702@node1"
    lanes = {
        (lane["role"], lane["name"]): lane["rows"] for lane in asked(planted["straggler"], "timeline", step=5)["lanes"]
    }
    ends = {
        name: max(bar["to"] for row in rows for bar in row) for (role, name), rows in lanes.items() if "groups" in role
    }
    assert max(ends, key=ends.__getitem__) == f"rank {SLOW_RANK}"
    assert [bar["name"] for bar in lanes["driver", "phases"][0]] == ["rollout", "judge", "learn", "publish"]
    assert [row[0]["name"] for row in lanes["actor", "rank 3"]] == ["train"]
    assert asked(planted["sound"], "time")["slow_ranks"] == []


def test_a_reward_that_pays_the_empty_answer_is_seen_in_the_rollouts_that_score_best(planted):
    run = planted["empty"]
    assert bad(rule(run, "actor/entropy")) == []
    assert "reward/std" in {one["name"] for one in asked(run, "health")["rules"]}
    empty = asked(run, "rollouts", step=30, only="empty", limit=100)
    assert empty["found"] > 8
    assert {(row["response"], row["score"]) for row in empty["rows"]} == {("", 1.0)}
    assert asked(run, "rollouts", step=30, sort="-score", limit=1)["rows"][0]["score"] == 1.0
    _, lengths = curve(run, "rollout/response_length")
    assert lengths[-1] < 0.2 * lengths[0]


def test_prompts_that_are_impossible_are_the_groups_without_signal(planted):
    run = planted["impossible"]
    assert bad(rule(run, "actor/without_signal"), "watch")
    lost = asked(run, "rollouts", step=12, only="no signal", limit=100)["rows"]
    assert {"train:1", "train:3"} <= {row["name"] for row in lost if row["score"] == 0.0}
    followed = asked(run, "prompt", name="train:1")["steps"]
    assert [one["step"] for one in followed] == list(range(1, 13))
    assert {score for one in followed for score in one["scores"]} == {0.0}


def test_a_rollout_is_shown_token_by_token(planted):
    rows = asked(planted["sound"], "rollouts", step=2, only="trained")["rows"]
    one = asked(planted["sound"], "rollout", step=2, place=rows[0]["place"])
    assert "".join(one["pieces"]) == one["response"] + "⟨end of text⟩"
    assert (
        len(one["pieces"]) == len(one["advantages"]) == len(one["ratio"]) == len(one["difference"]) == len(one["why"])
    )
    assert set(one["why"]) == {0}
    group = asked(planted["sound"], "group", step=2, prompt=rows[0]["prompt_index"])
    assert [row["sample_index"] for row in group["rows"]] == [0, 1, 2, 3]


def reasons(run, step, row):
    found = asked(run, "rollout", step=step, place=row["place"])
    return {found["reasons"][why] for why in found["why"]} | ({found["note"]} if found["note"] else set())


def test_each_row_that_is_not_trained_says_why(planted):
    lost = asked(planted["impossible"], "rollouts", step=3, only="no signal")["rows"][0]
    assert reasons(planted["impossible"], 3, lost) == {"group without signal: its rollouts earned the same"}
    rows = asked(planted["broken"], "rollouts", step=3)["rows"]
    assert reasons(planted["broken"], 3, rows[0]) == {"left out: raised: boom"}
    assert reasons(planted["broken"], 3, rows[1]) == {"truncated, and rollout.mask_truncated is set"}
    assert reasons(planted["broken"], 3, rows[-1]) == {"its group had no signal, and was replaced"}
    found = asked(planted["broken"], "rollouts", step=3)["filters"]
    assert (found["failed"], found["truncated"], found["replaced"]) == (1, 1, 4)


def test_a_row_without_advantage_that_the_kl_trains_says_so(planted):
    same = next(row for row in asked(planted["sound"], "rollouts", step=3, limit=16)["rows"] if row["advantage"] == 0)
    assert reasons(planted["sound"], 3, same) == {
        "trained",
        "its advantages are 0: it is trained by the KL, or the entropy bonus, alone",
    }
    assert "no signal" in same["tags"]


def test_a_file_of_a_version_that_did_not_keep_what_the_update_computed_says_so(tmp_path):
    path = planted_run(tmp_path, "agent", num_steps=3, last="finished", **SHAPE)
    file = path / "rollouts/step_000003.parquet"
    table = pq.read_table(file).drop_columns("entropies")
    nothing = pa.nulls(len(table), table.schema.field("old_logprobs").type)
    place = table.column_names.index("old_logprobs")
    pq.write_table(table.set_column(place, "old_logprobs", nothing), file)
    run = RunReader(path)
    row = asked(run, "rollouts", step=3, only="trained")["rows"][0]
    assert row["gap"] is None
    one = asked(run, "rollout", step=3, place=row["place"])
    assert one["ratio"] is one["difference"] is one["entropy"] is None
    assert one["surprise"] is not None
    assert one["unrecorded"] == "the version of rallypoint that trained here wrote none"
    assert "what corrections masked is not known" in one["note"]
    assert asked(run, "rollouts", step=2, sort="-gap")["rows"][0]["gap"] > 0


def test_the_entropy_of_each_token_is_that_of_the_file_and_what_the_update_left_out_says_why(planted):
    run = planted["sound"]
    stored = pq.read_table(run.folder.path / "rollouts/step_000002.parquet").column("entropies").to_pylist()
    for place in (0, 5):
        assert asked(run, "rollout", step=2, place=place)["entropy"] == pytest.approx(stored[place], rel=1e-4)
    lost = asked(planted["impossible"], "rollouts", step=3, only="no signal")["rows"][0]
    one = asked(planted["impossible"], "rollout", step=3, place=lost["place"])
    assert one["entropy"] is one["ratio"] is None
    assert one["unrecorded"] == "group without signal: its rollouts earned the same"


def test_what_a_tool_said_and_what_a_correction_masks_is_not_trained_and_says_so(planted):
    run = planted["agent"]
    row = next(row for row in asked(run, "rollouts", step=2, only="trained")["rows"] if row["advantage"])
    one = asked(run, "rollout", step=2, place=row["place"])
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


def test_a_page_that_reads_no_group_that_was_trained_on_counts_the_same_waste(planted):
    for run in planted.values():
        assert run.now().account == account(read_journal(run.folder.journal))
    assert {one["cause"]: one["num"] for one in asked(planted["broken"], "time")["waste"]["wastes"]} == {
        "done again": 1,
        "started again": 1,
        "samplers waited": 0,
        "replaced": 4,
        "failed": 8,
    }


def test_a_reader_reads_one_thing_while_others_ask(planted):
    run = planted["hot"]
    fresh = RunReader(run.folder.path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: (fresh.now(), len(fresh.now().steps)), range(32)))
    assert {id(now) for now, _ in found} == {id(fresh.now())}
    assert {num for _, num in found} == {len(run.now().steps)}


def test_where_time_goes_has_its_numbers(planted):
    found = asked(planted["straggler"], "time")
    step = planted["straggler"].now().state.steps[5]
    assert found["tokens_per_s"][4] == pytest.approx(step.metrics["rollout/num_tokens"] / step.seconds, rel=1e-5)
    assert found["memory"] == [{"role": "actor", "peak": pytest.approx(1.6, abs=0.1), "planned": 2.0}]
    assert found["phases"]["learn"][0] == 0.9
    assert timing.time_spent(planted["hot"].now(), max_points=10)["each"] == 8


def test_of_two_ranks_the_slow_one_is_named(tmp_path):
    with Journal(tmp_path / "journal.jsonl") as journal:
        for step in range(1, 5):
            common = {"prompts": [], "asked_s": 0.0, "taken_s": 11.0, "loaded_s": 0.0}
            journal.append(BatchTaken(step=step, busy_s=[4.0, 11.0], **common))
            journal.append(StepDone(step=step, metrics={}, digests={}, seconds=12.0))
    assert asked(RunReader(tmp_path), "time")["slow_ranks"] == [{"rank": 1, "steps": 4, "of": 4}]


def test_what_broke_has_starts_losses_and_the_first_traceback_of_each_kind(planted):
    found = asked(planted["broken"], "broke")
    assert [one["how"] for one in found["starts"]] == ["killed", "finished"]
    assert [one["kind"] for one in found["lost"]] == ["RoleLost", "RolesRestarted"]
    failed = {(one["what"], one["kind"]): one for one in found["failed"]}
    assert failed["rollout", "raised"]["num"] == 5
    assert failed["score", "raised"]["num"] == 4
    assert all(TRACEBACK in one["said"] and one["step"] == 1 for one in failed.values())
    assert found["aside"] == ["step_000002.damaged"]
    assert planted["broken"].now().processes["rollout"][0] == "9001@node0"


def test_staleness_and_lengths_belong_to_health(planted):
    cards = {one["signal"] for one in asked(planted["sound"], "health")["rules"]}
    assert {
        "staleness",
        "length of responses",
        "groups without signal",
        "entropy",
        "clip fraction",
        "update KL",
    } <= cards


def test_what_excuses_a_value_is_said_at_its_steps(planted):
    entropy = rule(planted["empty"], "actor/entropy")
    reward = dict(zip(*curve(planted["empty"], "reward/mean"), strict=True))
    excused = {step for first, last, _ in entropy["excused"] for step in range(first, last + 1)}
    assert excused == {step for step in range(31, 49) if reward[step] >= 0.8}
    assert excused
    assert entropy["excuse"] == "reward/mean is 0.8 or more"


def test_scores_are_of_the_rollouts_that_are_shown_and_what_is_not_kept_says_why(planted):
    run = planted["impossible"]
    found = asked(run, "rollouts", step=5, search="train:1")
    assert (found["group_size"], found["scores"]) == (4, [4, 0.0, 0.0, 0.0])
    for reader, step, kind, why in (
        (run, 5, "validation", "nothing was validated after step 5"),
        (planted["hot"], 20, "validation", "the run has written none"),
        (run, 13, "step", "the newest are of step 12"),
    ):
        with pytest.raises(RunFolderError, match=why):
            asked(reader, "rollouts", step=step, kind=kind)


def test_the_page_opens_with_what_its_recipe_watches(tmp_path):
    run = create_run(load_config("sft", [f"trainer.runs_dir={tmp_path}", "model.path=m", "data.train=[d.jsonl]"]))
    with Journal(run.journal) as journal:
        config = dict(values_of(load_config(str(run.path)).config))
        journal.append(RunBegan(first=0, config=config, software={}, machine=""))
        for step, loss in enumerate((3.0, 1.0, 2.0), 1):
            journal.append(StepDone(step=step, metrics={"actor/loss": loss}, digests={}, seconds=1.0))
            journal.append(Validated(step=step, metrics={"validation/loss": loss}))
    found = asked(RunReader(run.path), "summary")
    assert (found["headline"], found["validation"]) == (["actor/loss", "loss"], "validation/loss")
    assert found["best"] == {"step": 2, "score": 1.0, "name": "validation/loss"}


def test_two_runs_are_compared_down_to_the_first_event_that_differs(planted):
    found = answer([planted["sound"], planted["empty"]], "compare", {"with": "empty"})
    assert {one["key"] for one in found["free"]} >= {"trainer.name"}
    assert found["first"]["step"] == 1


def test_of_more_steps_than_points_each_extreme_stands_at_its_own_step(planted):
    for name in ("actor/approx_kl", "reward/mean"):
        whole = dict(zip(*curve(planted["hot"], name), strict=True))
        steps, values = curve(planted["hot"], name, points=10)
        assert len(steps) <= 10
        assert all(whole[step] == value for step, value in zip(steps, values, strict=True))
        assert {max(whole.values()), min(whole.values())} <= set(values)


def test_validations_are_never_thinned_and_the_numbers_of_a_step_are_exact(planted):
    run = planted["hot"]
    assert curve(run, "validation/score", points=2)[0] == [20, 40, 60, 80]
    values = asked(run, "values", step=45)
    assert values["metrics"]["actor/lr"] == 1e-6
    assert values["validation"]["validation/score"] == pytest.approx(curve(run, "validation/score")[1][1], rel=1e-5)


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
        assert asked(run, "summary")["step"] == 4
    assert json.loads(to_json(curve(run, "reward/mean")))[1][-1] is None
    assert json.loads(to_json(asked(run, "values", step=4)))["metrics"]["reward/mean"] is None
    assert rule(run, "reward/mean")["words"] == "reward/mean not finite"
    assert run.now() is run.now()
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


def test_a_key_of_other_characters_is_refused_and_metrics_take_it_from_their_address(tmp_path):
    run = RunReader(planted_run(tmp_path, num_steps=1, **SHAPE))
    guarded = TestClient(make_page([run], Access(keys=("s3cret",), hosts=(), max_body_bytes=1)))
    assert guarded.get("/?key=%E2%82%AC").status_code == 401
    assert guarded.get("/", headers={"cookie": "rally_view=%E2%82%AC"}).status_code == 401
    told = TestClient(guarded.app).get("/metrics?key=s3cret", follow_redirects=False)
    assert (told.status_code, "rallypoint_step" in told.text) == (200, True)


def test_what_fails_costs_its_panel(planted):
    class Odd(RunReader):
        def now(self):
            raise ZeroDivisionError("odd")

    odd = Odd(planted["sound"].folder.path)
    client = TestClient(make_page([odd], Access(keys=(), hosts=("testserver",), max_body_bytes=1)))
    found = client.get("/api/summary")
    assert (found.status_code, found.json()) == (200, {"error": "odd"})


def test_a_server_with_an_open_stream_of_news_ends_at_once(tmp_path):
    run = RunReader(planted_run(tmp_path, num_steps=1, **SHAPE))
    with PageServer([run]) as server:
        stream = urllib.request.urlopen(f"{server.url}live")
        assert json.loads(stream.readline().removeprefix(b"data: "))["run"] == "sound"
    assert stream.read().strip() == b""  # it ended in order: no chunk is missing


def data_of(html):
    return json.loads(html.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_a_report_is_one_small_file_in_which_no_text_of_a_run_can_end_the_data(tmp_path):
    run = RunReader(planted_run(tmp_path, num_steps=30, last="finished", texts=HOSTILE, **SHAPE))
    said = write_report([run], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert len(html.encode()) <= MAX_BYTES
    assert "rollouts of" in said
    assert "of 30 steps" in said
    assert data_of(html)['["runs"]'] == {"runs": ["sound"]}
    assert html.count("</script>") == 2
    assert "src=" not in html.split('id="data"')[0].replace("src 'sha", "")
    assert "connect-src" not in html


def test_a_report_of_large_steps_of_which_every_character_is_escaped_keeps_below_its_size(tmp_path):
    texts = ["<" * 5000, '"\\' * 3000]
    path = planted_run(tmp_path, num_steps=30, prompts=3, group=16, last="finished", texts=texts)
    small = RunReader(planted_run(tmp_path, num_steps=3, last="finished", name="small", **SHAPE))
    write_report([RunReader(path), small], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert 0.5 * MAX_BYTES < len(html.encode()) <= MAX_BYTES
    kept = data_of(html)["report"]["steps"]
    assert kept["small"] == [1, 2, 3]
    assert len(kept["sound"]) > 3


def test_a_report_has_whole_groups_of_every_kind_and_says_how_many(tmp_path):
    run = RunReader(planted_run(tmp_path, "broken", num_steps=2, prompts=20, group=8, last="finished"))
    write_report([run], tmp_path / "report.html")
    found = data_of((tmp_path / "report.html").read_text())['["rollouts",["run","broken"],["step","2"]]']
    assert (found["total"], len(found["rows"])) == (160, 48)
    assert {tag for row in found["rows"] for tag in row["tags"]} >= {"trained", "failed", "truncated", "replaced"}
    sizes = Counter(row["prompt_index"] for row in found["rows"])
    assert set(sizes.values()) == {8}


def test_names_with_any_characters_have_a_report(tmp_path):
    run = RunReader(planted_run(tmp_path, num_steps=2, last="finished", **SHAPE), "a~b*c d/é")
    write_report([run], tmp_path / "report.html")
    assert data_of((tmp_path / "report.html").read_text())['["summary",["run","a~b*c d/é"]]']["step"] == 2
