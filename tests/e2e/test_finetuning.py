"""Training on answers as they are: fine-tuning, on every mesh, killed and resumed."""

import json
import random

import pytest
import torch
from chat_templates import QWEN3, make_chat_tokenizer, merging_tokenizer
from grids import thinned
from metrics_file import read_metrics
from safetensors.torch import load_file
from tiny_models import make_tiny_model
from tiny_runs import Runs, weights_of

from rallypoint.display import Silent
from rallypoint.errors import ModelError
from rallypoint.model_files import load_policy, load_reward_model
from rallypoint.prepare.material import examine
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.export import export
from rallypoint.recipes.loop import train
from rallypoint.recipes.use import Asked, complete, find_trained

pytestmark = pytest.mark.lasting_ray

MODEL = "{hidden_size: 16, num_layers: 1, num_heads: 2, num_key_value_heads: 2, intermediate_size: 32}"
TINY = f"""\
model: {{create: {MODEL}}}
actor: {{optimizer: {{lr: 1e-2, schedule: constant, warmup_ratio: 0}}}}
trainer: {{num_steps: 4}}
validation: {{every_steps: 2}}
cluster: {{runtime: inline, pools: {{main: [1]}}}}
"""


def sorted_digits(num, seed):
    """Yield digits and the same in order."""
    draw = random.Random(seed)
    for _ in range(num):
        digits = "".join(draw.choice("0123456789") for _ in range(draw.randint(2, 4)))
        yield digits, "".join(sorted(digits))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sft(tmp_path):
    """Runs of a recipe that learns to sort, from conversations of one turn and of two."""
    rows = []
    for name, num in (("train", 60), ("validation", 12)):
        turns = [
            [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            for asked, answer in sorted_digits(num, name)
        ]
        rows = [{"messages": turn} for turn in turns[::2]]
        rows += [{"messages": [*first, *second]} for first, second in zip(turns[1::4], turns[3::4], strict=True)]
        write(tmp_path / f"{name}.jsonl", rows)
    files = f"train: {tmp_path}/train.jsonl, validation: {tmp_path}/validation.jsonl"
    data = f"data: {{{files}, num_examples: 8, max_row_tokens: 24}}\n"
    (tmp_path / "mine.yaml").write_text(f"base: sft\n{TINY}{data}")
    return Runs(tmp_path / "runs")


def start(runs, name, *more):
    own = (f"trainer.runs_dir={runs.folder}", f"trainer.name={name}")
    return runs.run_with(str(runs.folder.parent / "mine.yaml"), [*own, *more])


def column(run, name):
    return [record[name] for record in read_metrics(run.metrics) if name in record]


def test_sft_learns_for_whole_epochs_and_validation_says_so(sft):
    run = start(sft, "run", "trainer.num_epochs=3")
    losses = column(run, "actor/loss")
    assert len(losses) == 17, "45 examples, three times, eight at a time"
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5
    assert column(run, "validation/loss")[-1] < column(run, "validation/loss")[0] - 0.5
    assert column(run, "validation/score") == [-loss for loss in column(run, "validation/loss")]
    assert column(run, "data/epoch")[-1] == 3, "the last step takes the seven that are left"
    counted = next(record for record in read_metrics(run.metrics) if "data/num_examples" in record)
    assert counted["data/num_examples"] == 45
    assert 3 * counted["data/num_trained_tokens"] == sum(column(run, "actor/num_tokens"))
    assert "num_steps: 17" in (run.path / "config.yaml").read_text()


def test_a_killed_run_of_sft_ends_with_the_same_bits(sft):
    whole = start(sft, "whole", "checkpoint={every_steps: 2, keep: 9}", "actor.num_mini_batches=2")
    wanted, losses = weights_of(whole), column(whole, "actor/loss")
    assert {name.partition("/")[0] for name in wanted} == {"model.safetensors", "training"}
    assert train(load_checked(str(whole.path)), whole, Silent(), resume=True, from_step=2)
    assert weights_of(whole) == wanted
    assert column(whole, "actor/loss") == losses


def check_stream(runs, name, num):
    """Train from a file that is read as the run goes, beside one that is read at the start, and resume it."""
    file = runs.folder.parent / "train.jsonl"
    keys = ("data.shuffle=false", "trainer={num_epochs: null, num_steps: 7}", "checkpoint={every_steps: 2, keep: 9}")
    read = start(runs, f"{name}-read", *keys)
    stream = start(runs, name, f"data.train=[{{path: {file}, stream_rows: 12}}]", *keys)
    wanted = weights_of(read)
    assert {key: one for key, one in weights_of(stream).items() if "initial" not in key} == {
        key: one for key, one in wanted.items() if "initial" not in key
    }, "windows of six in the order of the file, and an epoch and a half"
    assert column(read, "data/epoch")[-1] == 7 * 8 / num
    assert not column(stream, "data/epoch"), "nothing counts a stream where no epoch was asked for"
    whole = weights_of(stream)
    assert train(load_checked(str(stream.path)), stream, Silent(), resume=True, from_step=2)
    assert weights_of(stream) == whole


def test_sft_from_a_stream_ends_with_the_same_bits_and_so_it_does_where_it_was_killed(sft):
    check_stream(sft, "stream", 45)
    whole = start(
        sft,
        "epochs",
        "data.train=[{path: TRAIN, stream_rows: 20}]".replace("TRAIN", str(sft.folder.parent / "train.jsonl")),
        "trainer.num_epochs=2",
    )
    assert (column(whole, "data/epoch")[-1], len(column(whole, "data/epoch"))) == (2, 12), "90, eight at a time"
    assert not any(column(whole, f"data/num_{what}") for what in ("dropped", "truncated")), "a stream is not counted"


def test_a_base_model_becomes_one_that_chats_and_its_checkpoint_knows_its_end(tmp_path):
    base, template = make_chat_tokenizer(QWEN3, eos="<|endoftext|>"), tmp_path / "chat.jinja"
    template.write_text(QWEN3)
    base.chat_template = None
    make_tiny_model(tmp_path / "base", tokenizer=base, initializer_range=0.1)
    shown = write(tmp_path / "shown.jsonl", [{"prompt": asked, "completion": "<8>"} for asked in "01234567"])
    keys = [f"model.path={tmp_path}/base", f"data={{train: {shown}, num_examples: 8, max_row_tokens: 64}}"]
    keys += [f"trainer={{num_epochs: 25, runs_dir: {tmp_path}/runs, name: run}}", "actor.optimizer={lr: 2e-2}"]
    keys += ["cluster={runtime: inline, pools: {main: [1]}}"]
    with pytest.raises(ModelError, match=r"no chat template, .* set model.tokenizer.chat_template=FILE"):
        examine(load_checked("sft", keys).config)
    keys.append(f"model.tokenizer.chat_template={template}")
    run = Runs(tmp_path / "runs").run_with("sft", keys)
    template.unlink()
    trained = find_trained(str(run.path))
    export(trained, tmp_path / "exported", merge=None)
    asked = write(tmp_path / "asked.jsonl", [{"prompt": one} for one in "0123"])
    for one in (trained, find_trained(str(tmp_path / "exported"))):
        answers = complete(one, str(asked), Asked(0.0, max_response_tokens=30))
        assert answers == ["<think>\n\n</think>\n\n<8>"] * 4
    ends = json.loads((tmp_path / "exported" / "generation_config.json").read_text())["eos_token_id"]
    assert base.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]


def test_models_learn_to_say_and_to_prefer_a_word_that_would_merge_with_the_blank_that_ends_the_cue(tmp_path):
    """`A: ` and `yes`, where ` yes` is one token: fine-tuned to answer with two words, then made to prefer one."""
    merges = [("e", "s"), ("y", "es"), (" ", "yes"), ("n", "o"), (" ", "no")]
    make_tiny_model(tmp_path / "base", tokenizer=merging_tokenizer(" ", *merges), initializer_range=0.1)
    answers = {"fine": "yes", "ill": "no"}
    asked = write(tmp_path / "asked.jsonl", [{"prompt": one} for one in answers])
    shown = [{"prompt": one, "completion": answer} for one, answer in answers.items()]
    pairs = [{"prompt": one, "chosen": "no", "rejected": "yes"} for one in answers]
    model, runs = tmp_path / "base", Runs(tmp_path / "runs")
    tries = (("sft", shown, "1e-2", ["yes", "no"]), ("dpo", pairs, "1e-3", ["no", "no"]))
    for recipe, rows, rate, right in tries:
        data = write(tmp_path / f"{recipe}.jsonl", rows)
        keys = [f"model.path={model}", f"data={{train: {data}, num_examples: 2, max_row_tokens: 32}}"]
        keys += [f"trainer={{num_epochs: 25, runs_dir: {tmp_path}/runs, name: {recipe}}}", f"actor.optimizer.lr={rate}"]
        run = runs.run_with(
            recipe, [*keys, "checkpoint.every_steps=99", "cluster={runtime: inline, pools: {main: [1]}}"]
        )
        trained = find_trained(str(run.path))
        assert complete(trained, str(asked), Asked(0.0, max_response_tokens=4)) == right
        model = trained.path


MESHES = [("inline", "{dp_shard: 1}"), ("inline", "{sp: 2}"), ("inline", "{tp: 2}"), ("ray", "{dp_shard: 2}")]


@pytest.fixture(scope="module")
def alone():
    """A run in one process, of each recipe; the first test that compares with it makes it."""
    made = {}

    def run(runs):
        recipe = (runs.folder.parent / "mine.yaml").read_text().split()[1]
        return made.get(recipe) or made.setdefault(recipe, start(runs, "alone"))

    return run


# In threads, adapters of sft are cut over `tp` below, and pairs over `tp` and `sp`.
@pytest.mark.parametrize(
    ("runtime", "mesh"), [*(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in MESHES[:3]), MESHES[3]]
)
def test_sft_takes_the_same_steps_on_every_mesh_and_in_every_cut(sft, alone, runtime, mesh):
    cut = (f"cluster={{runtime: {runtime}, pools: {{main: [2]}}}}", "engine.max_tokens_per_micro_batch=30")
    found = start(sft, "cut", *cut, f"actor.mesh={mesh}")
    for name in ("actor/loss", "actor/grad_norm", "validation/loss"):
        assert column(found, name) == pytest.approx(column(alone(sft), name), rel=2e-5), name


def check_adapters(runs, mesh, names):
    """Train adapters in one process and on a mesh; resume the run on the mesh from its middle, and return the first."""
    keys = ("model.lora={rank: 4}", "checkpoint={every_steps: 2, keep: 9}")
    alone = start(runs, "alone", *keys)
    assert column(alone, "validation/loss")[-1] < column(alone, "validation/loss")[0]
    assert "adapter_model.safetensors" in weights_of(alone)
    cut = start(runs, "cut", *keys, "cluster.pools={main: [2]}", f"actor.mesh={mesh}")
    for name in names:
        assert column(cut, name) == pytest.approx(column(alone, name), rel=1e-4, abs=1e-5), name
    whole, found = (load_file(max(run.checkpoints.iterdir()) / "adapter_model.safetensors") for run in (alone, cut))
    assert found.keys() == whole.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5, msg=name)
    wanted, losses = weights_of(cut), column(cut, names[0])
    assert train(load_checked(str(cut.path)), cut, Silent(), resume=True, from_step=2)
    assert weights_of(cut) == wanted
    assert column(cut, names[0]) == losses
    return alone


def test_sft_trains_adapters_in_the_same_steps_on_a_mesh_also_after_a_resume(sft):
    check_adapters(sft, "{tp: 2}", ("actor/loss", "actor/grad_norm", "validation/loss"))


def test_what_sft_does_not_read_is_refused_on_the_command_line(sft):
    name = str(sft.folder.parent / "mine.yaml")
    with pytest.raises(ValueError, match=r"data.max_prompt_tokens=7 has no effect: with recipe=sft nothing reads it"):
        load_checked(name, ["data.max_prompt_tokens=7"])
    with pytest.raises(ValueError, match=r"data.generate makes prompts for rewards, and recipe=sft trains on answers"):
        load_checked("sft", ["model.create={}", "data.generate={}"])
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch=8 is less than one row .* 24 \(data.max_row_tok"):
        load_checked(name, ["engine.max_tokens_per_micro_batch=8"])
    with pytest.raises(ValueError, match=r"num_mini_batches=9 is more than the 8 examples of a step \(data.num_examp"):
        load_checked(name, ["actor.num_mini_batches=9"])
    assert load_checked("ppo", draft=True).config.num_rows == 512


TWO_BY_TWO = [("reward_model", "inline", "{sp: 2}"), ("dpo", "inline", "{tp: 2}")]
"""Of recipes and meshes, those that are always compared; sft is, on Ray."""


@pytest.fixture(params=["reward_model", "dpo"])
def pairs(request, tmp_path):
    """Runs of the recipes that learn from pairs: digits in order are preferred to digits that are not."""
    for name, num in (("train", 48), ("validation", 16)):
        rows = [
            {"prompt": asked, "chosen": answer, "rejected": "".join(reversed(answer)) + "0"}
            for asked, answer in sorted_digits(num, name)
        ]
        write(tmp_path / f"{name}.jsonl", rows)
    files = f"train: {tmp_path}/train.jsonl, validation: {tmp_path}/validation.jsonl"
    data = f"data: {{{files}, num_examples: 8, max_row_tokens: 16}}\n"
    tiny = TINY.replace("num_steps: 4", "num_steps: 4, num_epochs: null")
    (tmp_path / "mine.yaml").write_text(f"base: {request.param}\n{tiny}{data}")
    return Runs(tmp_path / "runs")


def test_pairs_are_learned_and_validation_says_how_well(pairs):
    run = start(pairs, "run", "trainer.num_epochs=4")
    accuracy, margin, loss = (column(run, f"validation/{name}") for name in ("accuracy", "margin", "loss"))
    assert column(run, "validation/score") == accuracy
    assert loss[0] == pytest.approx(0.693147, abs=1e-3), "log 2: nothing is known of the pairs yet"
    assert abs(margin[0]) < 1e-3
    assert accuracy[-1] >= 0.9
    assert margin[-1] > 0.1
    assert loss[-1] < loss[0] - 0.05
    assert column(run, "actor/accuracy")[-1] > 0.8


def test_a_killed_run_on_pairs_ends_with_the_same_bits(pairs):
    whole = start(pairs, "whole", "checkpoint={every_steps: 2, keep: 9}", "actor.num_mini_batches=3")
    wanted, losses = weights_of(whole), column(whole, "actor/loss")
    assert train(load_checked(str(whole.path)), whole, Silent(), resume=True, from_step=2)
    assert weights_of(whole) == wanted
    assert column(whole, "actor/loss") == losses
    assert train(load_checked(str(whole.path), ["trainer.num_steps=7"]), whole, Silent(), resume=True)
    assert len(column(whole, "actor/loss")) == 7, "a longer run takes pairs that the first one did not know"


@pytest.mark.parametrize("pairs", ["dpo", pytest.param("reward_model", marks=pytest.mark.slow)], indirect=True)
def test_pairs_from_a_stream_end_with_the_same_bits_and_so_they_do_where_the_run_was_killed(pairs):
    check_stream(pairs, "stream", 48)


@pytest.mark.parametrize(
    ("pairs", "runtime", "mesh"),
    thinned([(recipe, *where) for recipe in ("reward_model", "dpo") for where in MESHES], *TWO_BY_TWO),
    indirect=["pairs"],
)
def test_pairs_take_the_same_steps_on_every_mesh_and_in_every_cut(pairs, alone, runtime, mesh):
    cut = (f"cluster={{runtime: {runtime}, pools: {{main: [2]}}}}", "engine.max_tokens_per_micro_batch=33")
    found = start(pairs, "cut", *cut, f"actor.mesh={mesh}")
    for name in ("actor/loss", "actor/grad_norm", "actor/margin", "validation/loss", "validation/margin"):
        assert column(found, name) == pytest.approx(column(alone(pairs), name), rel=1e-4, abs=1e-5), name


# Policies train adapters with sft above, which takes the same learner.
@pytest.mark.parametrize("pairs", ["reward_model", pytest.param("dpo", marks=pytest.mark.slow)], indirect=True)
def test_pairs_train_adapters_in_the_same_steps_on_a_mesh_also_after_a_resume_and_they_are_exported(pairs):
    mesh = "{tp: 2}" if "base: reward_model" in (pairs.folder.parent / "mine.yaml").read_text() else "{sp: 2}"
    run = check_adapters(pairs, mesh, ("actor/loss", "actor/grad_norm", "actor/margin", "validation/loss"))
    trained, merged = find_trained(str(run.path)), pairs.folder / "merged"
    export(trained, merged, merge=None)
    if json.loads((merged / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]:
        load_reward_model.check(str(merged))
    else:
        load_policy.check(str(merged))


def test_a_pair_must_fit_into_one_micro_batch(pairs):
    with pytest.raises(
        ValueError, match=r"less than a pair can have, .* expected at least 32 \(2 x data.max_row_token"
    ):
        load_checked(str(pairs.folder.parent / "mine.yaml"), ["engine.max_tokens_per_micro_batch=31"])
