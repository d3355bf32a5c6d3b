"""The reward model's worker, called as the plain object that it is, and a handle without one."""

import asyncio

import pytest
import torch
from tiny_models import make_tiny_reward_model
from transformers import AutoModelForSequenceClassification

from rallypoint.cluster import Mesh, WorkerContext
from rallypoint.config import load_config
from rallypoint.roles.frozen import RewardModels, RewardWorker
from rallypoint.roles.placement import SharedFolder, WorkerSpec
from rallypoint.types import Sequences


@pytest.fixture
def spec(tmp_path):
    folder = make_tiny_reward_model(tmp_path / "scorer")
    config = load_config("digits", [f"reward.path={folder}", "reward.function=null"]).config
    return WorkerSpec(config, "unread", SharedFolder.marked(tmp_path), None)


@pytest.fixture
def worker(spec):
    return RewardWorker(WorkerContext("reward", 0, Mesh({"dp_replicate": 1}), 1, "cpu", {}, lambda: None), spec)


@pytest.fixture
def batch():
    """Two rows of a prompt, and one of another; of the responses two end by themselves."""
    return Sequences(
        offsets=torch.tensor([0, 5, 9, 13]),
        tokens=torch.tensor([3, 9, 12, 12, 0, 3, 9, 12, 11, 3, 8, 9, 0]),
        loss_mask=torch.tensor([False, False, True, True, True] + [False, False, True, True] * 2),
        prompt_index=torch.tensor([40, 40, 41]),
        sample_index=torch.tensor([0, 1, 0]),
    )


def test_a_row_has_its_score_at_its_last_token_and_nothing_elsewhere(worker, spec, batch):
    (values,) = worker.scores([batch], 0)
    model = AutoModelForSequenceClassification.from_pretrained(spec.config.reward.path).eval()
    for row in range(len(batch)):
        start, stop = batch.offsets[row : row + 2].tolist()
        with torch.no_grad():
            wanted = model(input_ids=batch.tokens[start:stop].unsqueeze(0)).logits.item()
        assert values.values[stop - 1].item() == pytest.approx(wanted, abs=1e-5)
        assert not values.values[start : stop - 1].any()
    assert values.values[4] > values.values[8] > values.values[12] == 0, "two sevens, one, none"


def test_a_reward_model_that_sleeps_between_its_turns_says_the_same(worker, batch):
    awake = worker.scores([batch], 0)[0].values
    for weight in worker.engine.model.parameters():
        weight.data = weight.data.clone()  # on CPUs, memory that a file was read into cannot be given back
    worker.lease.sleep_between(worker.engine)
    assert not any(weight.untyped_storage().nbytes() for weight in worker.engine.model.parameters())
    assert torch.equal(worker.scores([batch], 0)[0].values, awake)
    assert worker.memory()["memory_gib"].scalar > 0


def test_all_reward_models_of_a_role_sleep_between_its_turns_and_each_says_its_own(tmp_path, batch):
    folders = {name: make_tiny_reward_model(tmp_path / name, likes=likes) for name, likes in (("a", "7"), ("b", "9"))}
    models = ", ".join(f"{{name: {name}, path: {folder}}}" for name, folder in folders.items())
    config = load_config("digits", [f"reward.models=[{models}]", "reward.function=null"]).config
    spec = WorkerSpec(config, "unread", SharedFolder.marked(tmp_path), None)
    worker = RewardWorker(WorkerContext("reward", 0, Mesh({"dp_replicate": 1}), 1, "cpu", {}, lambda: None), spec)
    awake = [worker.scores([batch], model)[0].values for model in range(2)]
    assert not torch.equal(*awake)
    weights = [weight for engine in worker.engines for weight in engine.model.parameters()]
    for weight in weights:
        weight.data = weight.data.clone()
    worker.lease.sleep_between(*worker.engines)
    assert not any(weight.untyped_storage().nbytes() for weight in weights)
    assert all(torch.equal(worker.scores([batch], model)[0].values, awake[model]) for model in range(2))
    assert not any(weight.untyped_storage().nbytes() for weight in weights)


def test_nothing_of_a_reward_model_can_be_trained(worker):
    assert worker.engine.optimizer is None
    assert not any(weight.requires_grad for weight in worker.engine.model.parameters())


def test_a_run_without_a_reward_model_has_one_that_has_nothing_to_say(spec, batch):
    assert asyncio.run(RewardModels(spec.config, None).scores(batch)) == []
