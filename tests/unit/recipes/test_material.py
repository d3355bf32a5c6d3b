"""What is compared before a model is used: its sizes with its tokenizer and with the rows of a run."""

import pytest
from tiny_models import make_tiny_model

from rallypoint.config import load_config
from rallypoint.data import make_digits_tokenizer
from rallypoint.errors import ModelError
from rallypoint.models.load import read_config
from rallypoint.recipes.material import Limits, check_vocabulary
from rallypoint.recipes.preflight import load_checked
from rallypoint.recipes.use import Conversation, Trained


@pytest.fixture
def folder(tmp_path):
    """A model whose tokenizer has one id more than its embedding has rows."""
    tokenizer = make_digits_tokenizer()
    make_tiny_model(
        tmp_path, tokenizer=tokenizer, num_layers=1, num_heads=2, num_key_value_heads=1, initializer_range=0.02
    )
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(folder):
    tokenizer = make_digits_tokenizer()
    model = read_config(folder, trust_remote_code=False)
    check_vocabulary(folder, tokenizer, model)
    assert Limits.of(model) == Limits(num_ids=20, max_positions=64)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ModelError, match="the tokenizer has 21 ids, but the embedding only 20 rows; use the tokenizer"):
        check_vocabulary(folder, tokenizer, model)
    with pytest.raises(ModelError, match="21 ids, but the embedding only 20 rows"):
        Conversation(Trained(folder, None), temperature=1.0, max_response_tokens=8, seed=0)


def limit_of(*overrides: str) -> int:
    rows = ("data.max_prompt_tokens=40", "rollout.max_response_tokens=25")
    return Limits(num_ids=20, max_positions=64).max_prompt_tokens(load_config("digits", [*rows, *overrides]).config)


def test_rows_longer_than_the_model_supports_are_refused():
    assert limit_of("rollout.max_response_tokens=24") == 40
    with pytest.raises(ModelError, match=r"supports rows of 64 tokens, but .* = 65; lower one"):
        limit_of()


@pytest.mark.parametrize("fate", ["drop", "truncate"])
def test_prompts_that_may_be_left_out_or_cut_have_what_responses_leave_of_the_positions(fate):
    assert limit_of(f"data.on_too_long={fate}") == 39
    with pytest.raises(ModelError, match="supports rows of 64 tokens"):
        limit_of(f"data.on_too_long={fate}", "rollout.max_response_tokens=64")


@pytest.fixture
def small_critic(tmp_path):
    """A run's folder, and the overrides for a policy whose critic supports fewer positions."""
    sizes = {"num_layers": 1, "num_heads": 2, "num_key_value_heads": 1}
    for name, max_positions in (("policy", 64), ("critic", 32)):
        make_tiny_model(tmp_path / name, max_positions=max_positions, **sizes)
    return [
        "model.create=null", f"model.path={tmp_path}/policy", f"critic.path={tmp_path}/critic",
        "data.max_prompt_tokens=24",
    ]  # fmt: skip


def test_rows_longer_than_the_critic_supports_are_refused(small_critic):
    load_checked("digits", [*small_critic, "rollout.max_response_tokens=8"])
    with pytest.raises(ValueError, match=r"=9 make rows of up to 33 tokens; .* at most 32, .* what critic\.path='"):
        load_checked("digits", [*small_critic, "rollout.max_response_tokens=9"])
    limits = Limits.of(read_config(small_critic[2].split("=")[1], trust_remote_code=False), "the critic")
    with pytest.raises(ModelError, match="the critic supports rows of 32 tokens"):
        limits.max_prompt_tokens(load_config("digits", ["rollout.max_response_tokens=33"]).config)
