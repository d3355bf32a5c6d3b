"""Recipes for real models: what their dry runs say for three machines, beside what docs/recipes.md says."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rallypoint.config import load_config, shipped_recipes
from rallypoint.config.shape import read_shape
from rallypoint.errors import ConfigError
from rallypoint.prepare.inventory import imagine

ROOT = Path(__file__).parents[3]
MACHINES = {"24 GB": "L4", "80 GB": "H100", "8 x 80 GB": "8xH100"}
MIXTURES = {"8 x 80 GB": "8xH100", "16 x 80 GB": "16xH100"}
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3.5-0.8B": 752_393_024,
    "Qwen/Qwen3.5-9B": 8_953_803_264,
    "Qwen/Qwen3.5-35B-A3B": 34_660_610_688,
    "openai/gpt-oss-20b": 20_914_757_184,
    "zai-org/GLM-4.5-Air": 106_852_245_504,
}


def table() -> list[list[str]]:
    """Return the cells of the rows for the three machines."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) == 9 and row[2] in MACHINES]


def plan(command, line: str, machine: str) -> str:
    result = command(*shlex.split(line)[1:], "--dry-run", "--on", MACHINES[machine])
    assert result.exit_code == 0, result.exception
    return result.stdout


def planned(said: str) -> tuple[str, ...]:
    """Return rows and updates of a step, and GiB of the actor, of the cache and of a process at most."""
    [rows], [updates] = re.findall(r"= (\d+) rows", said), re.findall(r"actor update +(\d+) optimizer", said)
    lines = {line.split()[0]: line for line in said.splitlines() if line.split()}
    sizes = {
        name: [float(size) / (1 if unit == "G" else 1024) for size, unit in re.findall(r"([\d.]+) ([GM])iB", line)]
        for name, line in lines.items()
    }
    held = (sizes["total"][0], max(sizes["cache"]), sizes["pool"][0])
    return f"{int(rows):,}", updates, *(f"{size:.1f}" for size in held)


@pytest.mark.parametrize("row", table(), ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_the_plan_of_a_recipe_is_what_its_page_says_and_fits_the_machine(command, row):
    recipe, model, machine, *numbers, line = row
    line = line.strip("`")
    assert shlex.split(line)[2] == recipe.strip("`")
    said = plan(command, line, machine)
    assert [*planned(said)] == numbers
    assert float(numbers[-1]) < imagine(MACHINES[machine]).accelerators[0].num_bytes / 2**30
    assert "may need" not in said
    assert f"{PUBLISHED[f'Qwen/{model}'] / 1e6:,.0f}"[:3] in said


def mixtures() -> list[list[str]]:
    """Return the cells of the rows of mixtures, which have rollouts in a pool of their own."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) == 7 and row[1] in MIXTURES]


@pytest.mark.parametrize("row", mixtures(), ids=lambda row: f"{row[0]} {row[1]} {row[2]}")
def test_the_plan_of_a_mixture_is_what_its_page_says(command, row):
    model, machine, _, *numbers, line = row
    said = command(*shlex.split(line.strip("`"))[1:], "--dry-run", "--on", MIXTURES[machine]).stdout
    lines = {each.split()[0]: each for each in said.splitlines() if each.split()}
    found = [re.findall(r"([\d.]+) GiB", lines[name]) for name in ("total", "cache")]
    assert [*found[0], found[1][-1]] == numbers
    assert "may need" not in said
    [size] = [size for name, size in PUBLISHED.items() if name.endswith(f"/{model}")]
    assert f"{size // 10**6:,}." in said


@pytest.mark.parametrize("model", ["Qwen3-32B", "Qwen3-30B-A3B"])
def test_over_how_many_devices_a_large_model_samples_is_chosen_with_the_rest_of_its_plan(command, model):
    text = (ROOT / "docs" / "recipes.md").read_text()
    plans = r"plans ([\d.]+) GiB, ([\d.]+) of them weights of the server and ([\d.]+) its cache"
    [[line, *held]] = re.findall(rf"`rally (train math-dapo model.path=Qwen/Qwen3-32B .*)`\n{plans}", text)
    said = command(*shlex.split(line.replace("Qwen3-32B", model)), "--dry-run", "--on", "8xH100").stdout
    chosen = "rollout.mesh.tp=4 actor.mesh.dp_shard=8: chosen for this machine"
    assert f"{chosen}, where a device has no room for the whole model" in said
    assert "vLLM servers: 2, each over the devices of 4 processes" in said
    if model == "Qwen3-32B":
        assert f"pool main [8]: {held[0]} GiB" in said
        assert re.search(rf"weights .* {held[1]} GiB\n", said)
        assert re.search(rf"cache .* {held[2]} GiB\n", said)


@pytest.mark.parametrize("machine", ["8xH100", "2x8xH100"])
def test_a_mixture_that_no_rollout_rank_has_room_for_is_refused_with_its_plan(command, machine):
    result = command("train", "moe-grpo", "model.path=zai-org/GLM-4.5-Air", "--dry-run", "--on", machine)
    [found] = re.findall(r"total +([\d.]+) GiB +([\d.]+) GiB", result.stdout)
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert f"an actor of adapters takes {found[0]} GiB" in text
    assert f"a rollout rank needs {found[1]} GiB" in text
    assert "pool rollout: weights, gradients and optimizer of its roles take 199.2 GiB" in str(result.exception)
    assert str(result.exception).endswith(
        "79.1 GiB; divide the model (rollout.mesh.tp with rollout.engine=vllm over more processes)"
    )


def test_every_recipe_for_a_real_model_has_a_plan_for_each_machine():
    whole = {name for name in shipped_recipes() if str(load_config(name, draft=True).config.model.path).startswith("Q")}
    of_mixtures = {"moe-grpo"}
    known = {(name, on) for name in whole - of_mixtures for on in MACHINES}
    assert {(row[0].strip("`"), row[2]) for row in table()} == known
    assert {(shlex.split(row[-1].strip("`"))[2], row[1]) for row in mixtures()} == {
        (name, on) for name in of_mixtures for on in MIXTURES
    }
    assert whole == {
        "moe-grpo",
        "gsm8k-grpo",
        "gsm8k-ppo",
        "hybrid-grpo",
        "math-dapo",
        "math-lora",
        "math-opd",
        "code",
        "tool-math",
        "search",
        "games",
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shape_of_a_published_model_is_the_one_that_transformers_makes_of_its_config(name):
    file = ROOT / "src" / "rallypoint" / "config" / "models" / f"{name.replace('/', '--')}.json"
    values = json.loads(file.read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values["model_type"]].from_dict(values))
    sizes = [weight.numel() for weight in model.parameters()]
    assert sum(sizes) == PUBLISHED[name]
    shape = read_shape(name)
    assert shape is not None
    assert shape.num_parameters == pytest.approx(PUBLISHED[name], rel=1e-4)  # without the biases of Qwen2
    in_blocks = sum(1 << (size - 1).bit_length() for size in sizes) / sum(sizes)
    assert shape.rounded_up(1) == pytest.approx(in_blocks, rel=0.01)


def test_a_model_that_a_device_cannot_hold_is_refused_for_a_machine_elsewhere(command):
    said = str(command("train", "math-dapo", "engine.offload=nothing", "--dry-run", "--on", "L4").exception)
    assert "take 28.8 GiB in each process, but a L4 has 22.0 GiB" in said


@pytest.mark.parametrize(
    ("model", "on", "offload"),
    [("1.7B", "A10G", "optimizer"), ("4B", "H100", "optimizer"), ("8B", "H100", "optimizer_and_gradients")],
)
def test_what_one_device_has_no_room_for_waits_in_cpu_memory(command, model, on, offload):
    said = command("train", "gsm8k-grpo", f"model.path=Qwen/Qwen3-{model}", "--dry-run", "--on", on).stdout
    assert f"engine.offload={offload}: chosen for this machine" in said
    assert "copying gradients" in said or offload == "optimizer"


def test_a_machine_that_nobody_knows_is_refused(command):
    with pytest.raises(ConfigError, match="--on 8xabacus: expected a number and a type, such as 8xH100"):
        imagine("8xabacus")
    assert command("train", "gsm8k-grpo", "--on", "L4").exit_code == 2


def test_a_model_whose_sizes_are_not_known_is_planned_from_its_config_json_alone(command, tmp_path):
    said = command("train", "math-dapo", "model.path=Else/Where-1B", "--dry-run", "--on", "8xH100").stdout
    assert "the sizes of Else/Where-1B are not known here" in said
    assert "hf download Else/Where-1B config.json --local-dir FOLDER, and give model.path=FOLDER" in said
    kept = ROOT / "src" / "rallypoint" / "config" / "models" / "Qwen--Qwen3-0.6B.json"
    (tmp_path / "config.json").write_bytes(kept.read_bytes())
    said = command("train", "math-dapo", f"model.path={tmp_path}", "--dry-run", "--on", "8xH100").stdout
    assert "596.05M parameters" in said
    assert "are not known" not in said
    here = command("train", "math-dapo", f"model.path={tmp_path}", "--dry-run")
    assert "no *.safetensors in it" in str(here.exception)


def test_a_plan_for_another_machine_notes_what_is_not_here_and_refuses_what_is_wrong_anywhere(
    command, monkeypatch, tmp_path
):
    monkeypatch.setenv("RALLYPOINT_ENGINES", str(tmp_path))
    asked = ("train", "grpo", "model.path=Qwen/Qwen3-0.6B", "--dry-run", "--on", "8xH100", "rollout.engine=vllm")
    lacking = (*asked, "data.train=/data/no.jsonl", "reward.function=no.py:f", "tracking=[swanlab]")
    done = command(*lacking)
    assert done.exit_code == 0, done.exception
    for said in ("data.train: /data/no.jsonl does not exist", "reward.function='no.py:f': no.py does not exist"):
        assert f"not here, and perhaps there: {said}" in done.stdout
    assert "not here, and perhaps there: rollout.engine='vllm': vllm is not installed" in done.stdout
    assert "not here, and perhaps there: tracking" in done.stdout
    assert "cluster.device=cuda: planned with it, so start the run with it" in done.stdout, "the recipe says cpu"
    here = str(command(*(one for one in lacking if one not in ("--on", "8xH100"))).exception)
    assert "/data/no.jsonl does not exist" in here
    wrong = str(command(*asked, "data.train=/data/no.jsonl", "reward.function=gsm8kk").exception)
    assert "found 'gsm8kk'" in wrong
    assert "no.jsonl" not in wrong
    assert command(*asked, "--resume").exit_code == 2


def test_a_plan_for_another_machine_of_a_model_that_is_not_here_says_what_to_copy(command):
    said = command("train", "math-dapo", "model.path=/no/model", "--dry-run", "--on", "8xH100").stdout
    assert "there is no /no/model here, so this plan has no memory" in said
    assert "copy its config.json into a folder here" in said
