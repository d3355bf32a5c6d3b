"""Two runs that threads of one process start at once: each has its own functions, rows, model and recipe."""

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from rallypoint.config import RECIPES, load_config
from rallypoint.cpu.threads import Lanes, few_threads
from rallypoint.data import load_tokenizer
from rallypoint.engine.determinism import prepare_process, process_as_found
from rallypoint.environments.episodes import load_episode
from rallypoint.environments.given import GIVEN, named
from rallypoint.library.rewards import specs_of, wanted_columns
from rallypoint.library.training import _named
from rallypoint.prepare.from_python import data_files, model_path
from rallypoint.recipes.grpo import GRPO
from rallypoint.recipes.recipe import page_of

NUM_TURNS = 200


def at_once(start, num_turns=NUM_TURNS):
    """Call `start` with 0 and with 1 in two threads, in step, some times over."""
    barrier = threading.Barrier(2)

    def turns(which):
        for _ in range(num_turns):
            barrier.wait(60)
            try:
                start(which, barrier)
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(turns, which) for which in (0, 1)]:
            one.result()


def rewards():
    def one():
        def reward(completion, answer, of_the_first):
            return 0.0

        return reward

    def other():
        def reward(completion, answer, of_the_second):
            return 1.0

        return reward

    return one(), other()


def test_rewards_of_one_name_are_two_and_each_asks_for_its_own_columns():
    both, columns = rewards(), ("of_the_first", "of_the_second")

    def start(which, barrier):
        with contextlib.ExitStack() as stack:
            spec = specs_of(both[which], stack)
            barrier.wait(60)
            assert GIVEN[spec].function.function is both[which]
            assert wanted_columns(spec) == [columns[which]]

    at_once(start)
    assert not GIVEN


def test_episodes_of_one_name_are_two():
    def make():
        async def episode(prompt, client):
            raise NotImplementedError

        return episode

    both = make(), make()

    def start(which, barrier):
        with named(both[which]) as spec:
            barrier.wait(60)
            assert load_episode(spec) is both[which]

    at_once(start)
    assert not GIVEN


def settings():
    variables = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("LRU_CACHE_CAPACITY")
    return sys.getswitchinterval(), torch.backends.cuda.cudnn_sdp_enabled(), *variables


def test_settings_of_the_process_stay_until_the_last_run_has_ended_and_are_given_back_then():
    """As `recipes.loop.train` keeps them; one begins and ends within the other, and one ends after it."""
    before, begun, may_end = settings(), [threading.Event() for _ in "ab"], [threading.Event() for _ in "ab"]

    def run(which):
        with process_as_found(), few_threads():
            prepare_process()
            Lanes(torch.device("cpu")).run([int, int], 1)
            begun[which].set()
            assert may_end[which].wait(60)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run, 0)
        begun[0].wait(60)
        second = threads.submit(run, 1)
        begun[1].wait(60)
        while_both, _ = settings(), may_end[0].set()
        first.result()
        while_second, _ = settings(), may_end[1].set()
        second.result()
    assert while_both == while_second != before
    assert settings() == before


@pytest.mark.parametrize("is_same", [False, True])
def test_recipes_of_one_name_are_two_and_one_class_is_one(is_same):
    def make():
        class Mine(GRPO):
            pass

        return Mine

    first = make()
    both = (first, first if is_same else make())

    def start(which, barrier):
        with contextlib.ExitStack() as stack:
            shipped, keys = _named(both[which], stack)
            barrier.wait(60)
            config = load_config(shipped, [f"recipe={keys['recipe']}"], draft=True).config
            assert page_of(config) is both[which]

    try:
        at_once(start, 3)
        assert ("Mine-2" in RECIPES) is not is_same
    finally:
        RECIPES.pop("Mine", None)
        RECIPES.pop("Mine-2", None)


def test_rows_and_a_model_in_memory_are_written_once_by_both(tmp_path):
    folder, store = make_tiny_model(tmp_path / "m"), tmp_path / "given"
    pair = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    found = set()

    def start(which, barrier):
        found.add(data_files([{"prompt": "1", "answer": "2"}], store)[0])
        barrier.wait(60)
        found.add(model_path(pair, store))

    at_once(start, 5)
    assert sorted(store.iterdir()) == sorted(map(Path, found))
    assert len(found) == 2


def test_new_models_have_the_weights_of_their_seeds_and_leave_torchs_generator_alone(tmp_path):
    alone = [weights(make_tiny_model(tmp_path / f"alone-{seed}", seed=seed)) for seed in (0, 1)]
    before = torch.random.get_rng_state()

    def start(which, barrier):
        assert weights(make_tiny_model(tmp_path / f"{which}", seed=which)) == alone[which]

    at_once(start, 5)
    assert torch.equal(torch.random.get_rng_state(), before)


def weights(folder):
    return (Path(folder) / "model.safetensors").read_bytes()
