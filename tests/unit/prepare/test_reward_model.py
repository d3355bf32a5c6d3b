"""Which reward models a policy can have: those that read its token ids, and all of its rows."""

import json

import pytest
from tiny_models import make_tiny_model, make_tiny_reward_model

from rallypoint.config import load_config
from rallypoint.data import load_tokenizer
from rallypoint.errors import ModelError
from rallypoint.prepare.model_limits import RowLimits, check_reward_model, id_notes, read_models

CONFIG = load_config("digits", ["reward.path=some/model"]).config


@pytest.fixture
def check(tmp_path):
    """Look at a reward model beside a policy of 20 ids and 64 positions."""
    policy = make_tiny_model(tmp_path / "policy")

    def look(path):
        return check_reward_model(path, policy, load_tokenizer(policy), trust_remote_code=False)

    return look


@pytest.fixture
def scorer(tmp_path):
    return make_tiny_reward_model(tmp_path / "scorer")


def edit_tokens(folder, change):
    file = f"{folder}/tokenizer.json"
    with open(file) as stream:
        content = json.load(stream)
    change(content["model"]["vocab"])
    with open(file, "w") as stream:
        json.dump(content, stream)


def test_a_model_with_the_policys_tokenizer_is_taken_with_its_limits(check, scorer):
    assert check(scorer).whose == "the reward model"


def test_tokens_that_only_the_reward_model_has_are_no_reason_to_refuse_it(check, tmp_path):
    folder = make_tiny_reward_model(tmp_path / "wider", vocab_size=22)
    edit_tokens(folder, lambda vocab: vocab.update({"*": 20}))
    check(folder)


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(check, scorer):
    edit_tokens(scorer, lambda vocab: vocab.update({"3": vocab["4"], "4": vocab["3"]}))
    with pytest.raises(ModelError, match=r"2 of the 20 tokens of .*: '3' is 8 for the policy and 9 here; the reward"):
        check(scorer)


def test_a_folder_without_a_tokenizer_is_refused(check, scorer, tmp_path):
    for file in (tmp_path / "scorer").glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match="scorer"):
        check(scorer)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_with_both_numbers(check, tmp_path):
    folder = make_tiny_reward_model(tmp_path / "narrow", vocab_size=19)
    config = load_config(
        "digits", [f"model.path={tmp_path}/policy", "model.create=null", f"reward.path={folder}"]
    ).config
    with pytest.raises(ModelError, match="narrow: the tokenizer has 20 ids, but the embedding only 19 rows"):
        read_models(config)


def test_ids_that_only_the_policy_has_are_said_at_the_start():
    limits = [RowLimits(24, 64), RowLimits(24, 64, "the critic"), RowLimits(20, 64, "the teacher"), RowLimits(None, 64)]
    (said,) = id_notes(limits)
    assert said.startswith("the policy has 24 ids, and the teacher 20: ")
    assert list(id_notes([RowLimits(20, 64), RowLimits(24, 64, "the teacher")])) == []


def test_rows_longer_than_the_model_supports_are_refused(check, tmp_path):
    folder = make_tiny_reward_model(tmp_path / "short", max_position_embeddings=15)
    with pytest.raises(ModelError, match=r"the reward model supports rows of 15 tokens, but .* = 16; lower one"):
        check(folder).max_data_tokens(CONFIG)


def test_a_policy_is_no_reward_model_and_neither_is_a_classifier_with_two_labels(check, tmp_path):
    with pytest.raises(ModelError, match="holds a LlamaForCausalLM, expected a reward model"):
        check(str(tmp_path / "policy"))
    with pytest.raises(ModelError, match="a classifier with 2 labels"):
        check(make_tiny_reward_model(tmp_path / "two", num_labels=2))
