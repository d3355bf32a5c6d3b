"""What the config says of a reward model: roles, plan, and what cannot be."""

import json
import re
from pathlib import Path

import pytest
from tiny_models import make_tiny_reward_model
from transformers import AutoModelForSequenceClassification

from rallypoint.config import load_config
from rallypoint.errors import ConfigError
from rallypoint.prepare.plan import make_plan
from rallypoint.prepare.preflight import load_checked
from rallypoint.run.folder import anchored

ALONE = ("reward.function=null", "reward.path=scorer")


@pytest.fixture
def scorer(here: Path) -> Path:
    make_tiny_reward_model(here / "scorer")
    return here / "scorer"


def test_a_reward_model_is_a_role_beside_the_reward_function_or_in_its_place(scorer):
    config = load_checked("base.yaml", ["reward.path=scorer"]).config
    assert list(config.roles) == ["actor", "rollout", "reward", "reference", "critic"]
    assert config.reward.function == "digits"
    assert load_checked("base.yaml", ALONE).config.reward.function is None


def test_the_plan_has_the_weights_of_the_reward_model_and_nothing_that_is_trained(scorer):
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    num_bytes = 4 * sum(weight.numel() for weight in model.parameters())
    plan = make_plan(load_config("base.yaml", [*ALONE, "model.lora={}"]).config)
    memory = next(memory for memory in plan.memory if memory.role == "reward")
    assert (memory.weights, memory.gradients, memory.optimizer, memory.cache) == (num_bytes, 0, 0, 0)
    assert memory.activations > 0
    assert (memory.pool, memory.num_ranks, memory.held) == ("main", 2, num_bytes)
    without = make_plan(load_config("base.yaml", ["model.lora={}"]).config)
    assert [other for other in plan.memory if other.role != "reward"] == list(without.memory)


SEVERAL = "[{name: helpful, path: scorer, weight: 0.7}, {name: safe, path: other}]"


def test_several_reward_models_are_one_role_with_the_weights_of_all(scorer, here):
    make_tiny_reward_model(here / "other", likes="3")
    config = load_checked("base.yaml", [f"reward.models={SEVERAL}"]).config
    assert list(config.roles) == ["actor", "rollout", "reward", "reference", "critic"]
    assert config.reward.weights == {"function": 1.0, "helpful": 0.7, "safe": 1.0}
    assert config.named_models == {"reward.models.helpful": "scorer", "reward.models.safe": "other"}
    memory = {one: make_plan(load_config("base.yaml", [one]).config).memory for one in
              ("reward.path=scorer", f"reward.models={SEVERAL}")}  # fmt: skip
    single, both = (next(m for m in found if m.role == "reward") for found in memory.values())
    assert (both.weights, both.activations) == (2 * single.weights, single.activations)
    anchored_paths = [one.path for one in anchored(config).reward.models]
    assert anchored_paths == [str(here / "scorer"), str(here / "other")]
    alone = ["recipe=grpo", "reward.function=null", "advantage={name: gdpo}", f"reward.models={SEVERAL}"]
    assert load_checked("base.yaml", alone).config.advantage.name == "gdpo"


def test_nothing_is_said_of_memory_while_the_reward_model_is_on_the_hub(here):
    assert make_plan(load_config("base.yaml", ["reward.path=some/model"]).config).memory == ()


def test_a_reward_model_that_sleeps_holds_nothing_while_others_have_their_turn(scorer):
    config = load_config("base.yaml", ["reward.path=scorer", "cluster.device=cuda", "engine.sleep=true"]).config
    assert "reward" in config.sleeping
    memory = next(memory for memory in make_plan(config).memory if memory.role == "reward")
    assert memory.held == 0 < memory.weights


WRONG = {
    "neither": ("reward.function=null", "reward.function: required, but not set; expected `file.py:compute_score`, or"),
    "no folder": ("reward.path=scorrer", "reward.path='scorrer': no such folder"),
    "a mesh of nothing": ("reward.mesh.tp=2", "reward.mesh.tp=2 has no effect: with reward.path=null nothing reads it"),
    "one of several": (
        "reward.models=[{name: safe, path: scorrer}]",
        "reward.models.safe='scorrer': no such folder",
    ),
    "one beside several": (
        "reward.path=scorer reward.models=[{name: safe, path: scorer}]",
        "reward.path='scorer' beside reward.models, which stand in its place",
    ),
    "a name twice": (
        "reward.function=null reward.functions=[{name: safe, function: exact}] "
        "reward.models=[{name: safe, path: scorer}]",
        "reward.models[0].name='safe' is also the name of another one; expected a different name",
    ),
    "the function's name": (
        "reward.models=[{name: function, path: scorer}]",
        "reward.models[0].name='function' is also the name of another one",
    ),
    "another pool": ("reward.path=scorer reward.placement.pool=b", "reward.placement.pool='b' is not in cluster.pools"),
    "ranks": ("reward.path=scorer reward.mesh.tp=4", "reward.mesh: tp=4 makes 4 ranks, but the role has 2"),
    "heads of its own": (
        "reward.path=scorer reward.mesh.tp=2",
        "reward.mesh.tp=2 does not divide 1 key/value heads; choose 1",
    ),
    "threads": (
        "reward.path=scorer reward.mesh.dp_shard=2 cluster.runtime=inline",
        "reward.mesh.dp_shard=2 needs a process for every rank",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_reward_section_is_refused_with_key_value_and_remedy(scorer, case):
    overrides, problem = WRONG[case]
    with pytest.raises(ConfigError) as raised:
        load_checked("base.yaml", re.split(r" (?=[a-z]+\.)", overrides))
    assert problem in str(raised.value)


def test_a_folder_without_weights_is_refused(scorer):
    (scorer / "model.safetensors").unlink()
    (scorer / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"reward\.path='scorer': no \*\.safetensors in it"):
        load_checked("base.yaml", ALONE)
