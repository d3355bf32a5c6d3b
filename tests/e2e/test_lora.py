"""Runs that train adapters: the same weights however they are carried out, and what is made of them afterwards."""

import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import Runs
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.recipes.use import find_trained

pytestmark = pytest.mark.lasting_ray

INLINE, ONE = "cluster.runtime=inline", "cluster.pools={main: [1]}"
LORA = "model.lora={rank: 4, alpha: 8}"


def rally(*arguments):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"}, prog_name="rally", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_killed_with_9_and_resumed_ends_with_the_same_adapters(runs, weights_of):
    steps = ("trainer.num_steps=6", "checkpoint={every_steps: 2, keep: 2}")
    whole = runs.run("whole", LORA, *steps, INLINE, ONE)
    process = runs.start("train", "digits", *runs.overrides("killed", LORA, *steps, INLINE, ONE))
    while not list((runs.folder / "killed").glob("checkpoints/step_*/manifest.json")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = weights_of(runs.resume("killed"))
    assert found == weights_of(whole)
    names = {"adapter_model.safetensors", "critic/adapter_model.safetensors"}
    assert set(found) == names | {"training/actor.safetensors", "training/critic.safetensors"}


# On Ray, test_same_weights.py does this with whole models, whose adapters take the same ways.
@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_split_roles_and_ranks_give_the_same_adapters_as_colocated_ones(runs, weights_of, runtime):
    """On its own pool the rollout role gets adapters only, and the reference loads a model of its own."""
    colocated = runs.run("colocated", LORA, INLINE, ONE)
    pools = ("rollout.placement.pool=second", "reference.placement.pool=second")
    split = runs.run("split", LORA, f"cluster.runtime={runtime}", "cluster.pools={main: [1], second: [1]}", *pools)
    assert weights_of(colocated) == weights_of(split)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with adapters that do something: at a high rate."""
    return Runs(tmp_path_factory.mktemp("trained")).run("trained", LORA, INLINE, ONE, "actor.optimizer.lr=0.03")


def test_a_trained_adapter_is_used_exported_and_trained_further(runs, trained, tmp_path):
    how = (str(trained.data / "validation.parquet"), "--temperature", "0", "--max-response-tokens", "5")
    scored = rally("eval", str(trained.path), *how)
    assert "AutoModelForCausalLM" in rally("export", str(trained.path), str(tmp_path / "merged"))
    again = rally("eval", str(tmp_path / "merged"), *how, "--reward", "digits")
    assert scored.splitlines()[0] == again.splitlines()[0]

    rally("export", str(trained.path), str(tmp_path / "adapter"), "--adapter")
    model, row = find_trained(str(tmp_path / "adapter")).load().model, torch.tensor([[3, 9, 10, 11, 0]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    base = AutoModelForCausalLM.from_pretrained(trained.model, attn_implementation="eager")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits, whole, before = (each(row, use_cache=False).logits for each in (model, merged, base))
    torch.testing.assert_close(whole, logits, rtol=1e-4, atol=1e-5)
    assert (logits - before).abs().max() > 0.01

    # As a start of another run: at a rate of almost nothing, it ends where it began.
    further = runs.run(
        "further",
        f"model.lora={{path: {tmp_path / 'adapter'}}}",
        *("model.create=null", f"model.path={trained.model}", "actor.optimizer.lr=1e-12", "trainer.num_steps=1"),
        *(INLINE, ONE),
    )
    first, last = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "adapter", max(further.checkpoints.iterdir()))
    )
    assert first.keys() == last.keys()
    for name, weight in first.items():
        torch.testing.assert_close(last[name], weight, rtol=0, atol=1e-9)


def test_adapters_of_experts_train_on_ranks_that_share_experts_and_go_on_in_one_process(runs, tmp_path):
    experts = "model.lora={rank: 4, alpha: 8, target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]}"
    keys = (experts, INLINE, "model.create.architecture=qwen3_moe", "checkpoint={every_steps: 1, keep: 9}")
    keys += ("actor.optimizer.lr=0.03", "rollout.router_replay=true", "model.create.num_key_value_heads=2")
    keys += ("trainer.num_steps=2",)
    alone = adapters_of(runs.run("one", *keys, ONE))
    roles = ("actor", "critic", "reference")
    run = runs.run("mesh", *keys, "cluster.pools={main: [2]}", *(f"{role}.mesh.ep=2" for role in roles))
    for later in sorted(run.checkpoints.iterdir())[1:]:
        later.rename(run.path / later.name)
    found = adapters_of(runs.resume("mesh", ONE, *(f"{role}.mesh.ep=1" for role in roles)))
    assert found.keys() == alone.keys()
    assert len([name for name in found if ".mlp.experts." in name]) == 2 * 2 * 2
    for name, wanted in alone.items():
        assert (found[name] - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max())), name

    rally("export", str(run.path), str(tmp_path / "merged"))
    rally("export", str(run.path), str(tmp_path / "adapter"), "--adapter")
    row, models = torch.tensor([[3, 9, 10, 11, 0]]), (tmp_path / "merged", tmp_path / "adapter", run.model)
    with torch.no_grad():
        whole, adapted, before = (AutoModelForCausalLM.from_pretrained(model)(row).logits for model in models)
    torch.testing.assert_close(whole, adapted, rtol=1e-4, atol=1e-5)
    assert (adapted - before).abs().max() > 0.01


def adapters_of(run):
    """The adapters of actor and critic in a run's newest checkpoint."""
    newest = max(run.checkpoints.iterdir())
    return {
        f"{role}{name}": weight
        for role in ("", "critic/")
        for name, weight in load_file(newest / role / "adapter_model.safetensors").items()
    }


def test_a_run_that_was_moved_still_finds_the_model_that_it_made(trained, tmp_path):
    moved = trained.path.rename(tmp_path / "moved")
    try:
        assert find_trained(str(moved)).base == str(moved / "model")
        assert find_trained(str(moved)).load() is not None
    finally:
        moved.rename(trained.path)
