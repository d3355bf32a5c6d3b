"""A student samples and a larger teacher judges every token: as advantage and as loss, on its own pool, by source."""

import json
import shutil

import pytest
from metrics_file import read_metrics
from tiny_runs import Runs, weights_of

from rallypoint.display import Silent
from rallypoint.errors import DataError, ModelError, TeacherError
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.recipes.serve import Options, Serving
from rallypoint.recipes.use import find_trained

pytestmark = pytest.mark.lasting_ray

TEACHER = "{hidden_size: 48, num_layers: 2, num_heads: 2, num_key_value_heads: 2, intermediate_size: 96}"
STUDENT = "{hidden_size: 16, num_layers: 1, num_heads: 2, num_key_value_heads: 2, intermediate_size: 32}"
FRAME = """\
cluster: {runtime: inline, pools: {main: [1]}}
actor: {optimizer: {lr: 1e-2, schedule: constant, warmup_ratio: 0}}
"""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A folder with prompts, and a teacher that answers a digit with the next one."""
    folder = tmp_path_factory.mktemp("taught")
    rows = [(str(digit) * times, str(digit + 1)) for digit in range(9) for times in (1, 2, 3)]
    write(folder / "shown.jsonl", [{"prompt": asked, "completion": answer} for asked, answer in rows])
    prompts = [
        {"prompt": asked, "ground_truth": answer, "data_source": "odd" if int(asked[0]) % 2 else "even"}
        for asked, answer in rows
    ]
    write(folder / "prompts.jsonl", prompts)
    (folder / "teach.yaml").write_text(
        f"base: sft\nmodel: {{create: {TEACHER}}}\n{FRAME}"
        f"data: {{train: {folder}/shown.jsonl, num_examples: 27, max_row_tokens: 10}}\n"
        f"trainer: {{num_epochs: null, num_steps: 40, runs_dir: {folder}/runs, name: teacher}}\n"
    )
    run = Runs(folder / "runs").run_with(str(folder / "teach.yaml"), [])
    assert [r["actor/loss"] for r in read_metrics(run.metrics) if "actor/loss" in r][-1] < 0.05
    shutil.copytree(max(run.checkpoints.iterdir()), folder / "teacher")
    (folder / "student.yaml").write_text(
        f"base: opd\nmodel: {{create: {STUDENT}}}\n{FRAME}teacher: {{path: {folder}/teacher}}\n"
        f"data: {{train: {folder}/prompts.jsonl, max_prompt_tokens: 6}}\n"
        "rollout: {num_prompts: 27, group_size: 4, max_response_tokens: 3}\n"
        "trainer: {num_steps: 4}\nvalidation: {every_steps: 100}\n"
    )
    return folder


@pytest.fixture
def runs(taught, tmp_path):
    return lambda name, *more: Runs(tmp_path).run_with(
        str(taught / "student.yaml"), [f"trainer.runs_dir={tmp_path}", f"trainer.name={name}", *more]
    )


def column(run, name):
    return [record[name] for record in read_metrics(run.metrics) if name in record]


@pytest.mark.parametrize(
    ("loss", "top_k"),
    [
        pytest.param("policy_gradient", "null", marks=pytest.mark.slow),  # with rewards it comes nearer below
        pytest.param("reverse", "null", marks=pytest.mark.slow),
        pytest.param("forward", 4, marks=pytest.mark.slow),
        pytest.param("mixed", "null", marks=pytest.mark.slow),
        pytest.param("mixed", 4, marks=pytest.mark.slow),  # its steps are compared below, with one of each kind
    ],
)
def test_a_student_comes_near_to_its_teacher(runs, loss, top_k):
    keys = (f"teacher.loss={loss}", f"teacher.top_k={top_k}")
    run = runs("run", *keys, "trainer.num_steps=20", "actor={num_mini_batches: 4, optimizer: {lr: 2e-2}}")
    gap = column(run, "actor/teacher_kl")
    assert gap[0] > 3, "it begins with all tokens alike"
    assert sum(gap[-3:]) / 3 < 0.85 * gap[0]


def test_every_prompt_has_the_teacher_of_its_source_or_none(runs, taught):
    one = runs("one", "trainer.num_steps=2")
    each = f"teacher.by_source={{odd: {taught}/teacher, even: {taught}/teacher}}"
    both = runs("both", each, "teacher.path=null", "trainer.num_steps=2")
    assert column(both, "actor/teacher_kl") == pytest.approx(column(one, "actor/teacher_kl"), rel=1e-5)
    half = (
        f"teacher.by_source={{odd: {taught}/teacher}}",
        "teacher.path=null",
        f"data.validation={taught}/prompts.jsonl",
    )
    part = runs("part", *half, "trainer.num_steps=1")
    assert 0 < column(part, "actor/teacher_kl")[0] != column(one, "actor/teacher_kl")[0]
    before, after = column(part, "validation/teacher_kl")
    assert column(part, "validation/score") == [-before, -after], "no reward says how good it is"
    assert before == pytest.approx(column(part, "actor/teacher_kl")[0], rel=0.25), "the same prompts, sampled again"
    names = {name for record in read_metrics(part.metrics) for name in record}
    assert [name for name in names if name.startswith("reward/") or name == "actor/without_signal"] == []


def test_rewards_and_teacher_are_streams_with_a_mean_each(runs, taught):
    (taught / "rewards.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str.startswith(ground_truth))\n"
    )
    reward = (f"reward.function={taught}/rewards.py:compute_score", "reward.num_processes=1")
    mixed = runs("mixed", *reward, "teacher.reward_coef=0.5", "trainer.num_steps=6")
    assert column(mixed, "actor/teacher_kl")[-1] < column(mixed, "actor/teacher_kl")[0]
    assert len(column(mixed, "actor/policy_loss")) == 6
    with pytest.raises(ValueError, match=r"reward.function: required"):
        load_checked(str(taught / "student.yaml"), ["teacher.reward_coef=0.5"])


@pytest.mark.parametrize(
    ("mesh", "how"), [("{tp: 2}", ()), ("{sp: 2}", ("teacher.top_k=3", "teacher.loss=mixed"))], ids=["tp", "sp, top k"]
)
def test_a_teacher_on_a_pool_of_its_own_gives_the_same_steps(runs, mesh, how):
    how += ("trainer.num_steps=2",)
    alone = runs("alone", *how)
    split = runs(
        "split", *how, "cluster.pools={main: [1], judges: [2]}", "teacher.placement.pool=judges", f"teacher.mesh={mesh}"
    )
    for name in ("actor/loss", "actor/teacher_kl", "actor/grad_norm"):
        assert column(split, name) == pytest.approx(column(alone, name), rel=1e-3), name


# Both losses on Ray's ranks, and `tp` with adapters below, are always compared.
# A student with adapters is compared on a mesh below, a teacher with its best tokens above; test_finetuning.py compares
# a model that is sharded over processes of Ray.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "mesh"), [("inline", "{tp: 2}"), ("ray", "{dp_shard: 2}")], ids=["tp", "ray, shard, adapters"]
)
def test_a_student_takes_the_same_steps_on_other_meshes(runs, runtime, mesh):
    how = ("teacher.loss=mixed", "teacher.top_k=4", "trainer.num_steps=2", "rollout.num_prompts=9")
    how += ("model.lora={rank: 4}",) if runtime == "ray" else ()
    alone = runs("alone", *how)
    cut = (f"cluster={{runtime: {runtime}, pools: {{main: [2]}}}}", "engine.max_tokens_per_micro_batch=40")
    split = runs("split", *how, *cut, f"actor.mesh={mesh}")
    for name in ("actor/loss", "actor/teacher_kl", "actor/teacher_mass", "actor/grad_norm"):
        assert column(split, name) == pytest.approx(column(alone, name), rel=1e-3), name
    assert ("adapter_model.safetensors" in weights_of(split)) == (runtime == "ray")


OPTIONS = Options(
    host="127.0.0.1",
    port=0,
    keys=(),
    max_concurrency=64,
    max_body_bytes=2**20,
    max_logprobs=4,
    dtype=None,
    cache_tokens=4096,
    exact=False,
    follow=False,
    on_load="keep",
    grace_s=5,
)


def test_a_teacher_behind_rally_serve_gives_the_same_steps(runs, taught):
    how = ("teacher.loss=mixed", "teacher.top_k=4", "trainer.num_steps=2")
    alone = runs("alone", *how)
    trained = find_trained(str(taught / "teacher"), trust_remote_code=False)
    with Serving(trained, OPTIONS, say=print, on_end=lambda: None) as server:
        url = f"{server.url}/v1"
        served = runs("served", *how, f"teacher.path={url}")
        both = runs("both", *how, f"teacher.by_source={{odd: '{url}'}}")
        with pytest.raises(TeacherError, match=r"status 400: .*expected at most 4 \(--max-logprobs of `rally serve`\)"):
            runs("more", *how, "teacher.top_k=5", f"teacher.path={url}")
    for run in (served, both):
        for name in ("actor/loss", "actor/teacher_kl", "actor/teacher_mass", "actor/grad_norm"):
            assert column(run, name) == pytest.approx(column(alone, name), rel=1e-3), name
    with pytest.raises(
        ValueError, match=r"rollout.temperature=0.7: http://.* says what its model says at temperature 1"
    ):
        load_checked(str(taught / "student.yaml"), [f"teacher.path={url}", "rollout.temperature=0.7"])


def test_a_stopped_run_ends_with_the_same_bits(runs):
    whole = runs("whole", "teacher.loss=forward", "teacher.top_k=5", "checkpoint={every_steps: 2, keep: 9}")
    wanted = weights_of(whole)
    assert train(load_checked(str(whole.path)), whole, Silent(), resume=True, from_step=2)
    assert weights_of(whole) == wanted


def test_adapters_of_a_student_are_the_same_on_a_mesh_also_after_a_resume(runs):
    how = ("model.lora={rank: 4}", "rollout.num_prompts=9", "trainer.num_steps=3")
    how += ("checkpoint={every_steps: 1, keep: 9}",)
    alone = runs("alone", *how)
    cut = runs("cut", *how, "cluster.pools={main: [2]}", "actor.mesh={tp: 2}")
    for name in ("actor/loss", "actor/teacher_kl", "actor/grad_norm"):
        assert column(cut, name) == pytest.approx(column(alone, name), rel=1e-3), name
    wanted = weights_of(cut)
    assert "adapter_model.safetensors" in wanted
    assert train(load_checked(str(cut.path)), cut, Silent(), resume=True, from_step=1)
    assert weights_of(cut) == wanted


def test_a_teacher_is_required_and_has_the_policys_tokenizer(runs, taught, tmp_path):
    name = str(taught / "student.yaml")
    with pytest.raises(ValueError, match=r"teacher.path: required, but not set; expected the Hugging Face folder"):
        load_checked(name, ["teacher.path=null"])
    with pytest.raises(ValueError, match=r"teacher.top_k=4 has no effect with teacher.loss=policy_gradient"):
        load_checked(name, ["teacher.top_k=4"])
    with pytest.raises(ValueError, match=r"teacher.path='nowhere': no such folder"):
        load_checked(name, ["teacher.path=nowhere"])
    other = tmp_path / "other"
    shutil.copytree(taught / "teacher", other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"7": 12', '"x": 12'))
    with pytest.raises(ModelError, match=r"'7' is 12 for the policy and nothing here; the teacher reads the policy's"):
        runs("refused", f"teacher.path={other}")


def test_a_policy_that_has_read_the_answer_teaches_itself(runs, taught, tmp_path):
    """Shown with their answers, prompts of a model that copies what is behind `=` are easy."""
    rows = [(str(digit), str((digit * 7 + 3) % 10)) for digit in range(10)]
    shown = [{"prompt": f"{asked}={answer}", "completion": answer} for asked, answer in rows]
    shown += [{"prompt": f"{asked}={other}", "completion": other} for asked, _ in rows for other in "0246813579"]
    write(tmp_path / "shown.jsonl", shown + [{"prompt": asked, "completion": "0"} for asked, _ in rows] * 5)
    write(tmp_path / "prompts.jsonl", [{"prompt": asked, "ground_truth": answer} for asked, answer in rows])
    (tmp_path / "copy.yaml").write_text(
        f"base: sft\nmodel: {{create: {TEACHER}}}\n{FRAME}"
        f"data: {{train: {tmp_path}/shown.jsonl, num_examples: 80, max_row_tokens: 10}}\n"
        f"trainer: {{num_epochs: null, num_steps: 60, runs_dir: {tmp_path}, name: copy}}\n"
    )
    copier = max(Runs(tmp_path).run_with(str(tmp_path / "copy.yaml"), []).checkpoints.iterdir())
    own = ("model.create=null", f"model.path={copier}", "teacher.path=null", "teacher.hint='={ground_truth}'")
    run = runs("own", *own, f"data.train={tmp_path}/prompts.jsonl", "teacher.loss=forward", "trainer.num_steps=1")
    assert column(run, "actor/teacher_kl")[0] > 1, "without the answer it says 0, with it it would not"
    assert not any("teacher" in name for name in read_metrics(run.metrics)[1] if name.endswith("memory_gib"))
    (tmp_path / "told.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    is_odd = int(ground_truth) % 2\n"
        "    return {'score': 0.0, 'feedback': ground_truth} if is_odd else 0.0\n"
    )
    reads = ("teacher.hint='={feedback}'", f"reward={{function: {tmp_path}/told.py:compute_score, num_processes: 1}}")
    keys = (*own, *reads, f"data.train={tmp_path}/prompts.jsonl", "rollout.num_prompts=10", "trainer.num_steps=1")
    told = runs("told", *keys, "teacher.loss=forward", "teacher.top_k=4")
    assert column(told, "actor/teacher_kl")[0] > 1
    assert 0.3 < column(told, "actor/teacher_judged")[0] < 0.7, "half of the prompts have feedback"
    with pytest.raises(ValueError, match=r"teacher.hint has {feedback}, which a reward function gives"):
        load_checked(str(taught / "student.yaml"), ["teacher.hint='{feedback}'"])
    with pytest.raises(DataError, match=r"with teacher.hint after each prompt: (.|\n)* max_prompt_tokens is 3"):
        runs("long", *own, f"data.train={tmp_path}/prompts.jsonl", "data.max_prompt_tokens=3")
    with pytest.raises(
        ValueError, match=r"teacher.hint='=7' says the same of every prompt; expected {ground_truth} or"
    ):
        load_checked(str(taught / "student.yaml"), ["teacher.hint='=7'"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_student_learns_from_a_teacher_faster_than_from_rewards(taught, tmp_path, seed):
    """One answer in 400 is right by chance: rewards seldom say anything, a teacher always does."""
    (taught / "exact.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    (tmp_path / "alone.yaml").write_text((taught / "student.yaml").read_text().replace("base: opd", "base: grpo"))
    scores = {}
    for name, file in (("taught", taught / "student.yaml"), ("alone", tmp_path / "alone.yaml")):
        keys = [
            f"reward={{function: {taught}/exact.py:compute_score, num_processes: 1}}",
            f"data.validation={taught}/prompts.jsonl",
            f"trainer={{num_steps: 40, runs_dir: {tmp_path}, name: {name}}}",
            f"seed={seed}",
            "validation.every_steps=10",
            "actor.num_mini_batches=4",
            "teacher.loss=forward" if name == "taught" else "kl=null",
        ]
        scores[name] = column(Runs(tmp_path).run_with(str(file), keys), "validation/score")
    print(f"seed {seed}:", {name: [round(score, 2) for score in found] for name, found in scores.items()})
    assert scores["taught"][-1] > max(0.6, scores["alone"][-1] + 0.2)
