"""What is compared before a model is used: its sizes with its tokenizer and with the rows of a run."""

import dataclasses

import pytest
from tiny_models import make_tiny_model

from rallypoint.config import load_config
from rallypoint.data import (
    Conversations,
    Example,
    Message,
    encode_prompts,
    encode_rows,
    load_tokenizer,
    make_digits_tokenizer,
)
from rallypoint.data.conversations import Conversation as Talk
from rallypoint.errors import ConfigError, DataError, ModelError, RequestError
from rallypoint.model_files.locate import read_config
from rallypoint.prepare.data_notes import check_sources, check_truths, repetitions
from rallypoint.prepare.model_limits import RowLimits, read_models, stop_tokens
from rallypoint.prepare.preflight import load_checked
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


def test_an_id_that_the_embedding_lacks_is_refused_only_where_it_is_read(folder, tmp_path):
    def talk():
        return Conversation(Trained(folder, None), temperature=1.0, max_response_tokens=8, seed=0)

    config = load_config("grpo", [f"model.path={folder}", f"data.train={folder}/x", "reward.function=exact"]).config
    assert "".join(talk().ask("12")) is not None
    assert read_models(config)[2][0] == RowLimits(num_ids=20, max_positions=64)
    with pytest.raises(RequestError, match="has the id 20, but the model knows 0 to 19"):
        "".join(talk().ask("1<new>"))
    with pytest.raises(DataError, match="token 1 of the prompt has the id 20, but the model knows 0 to 19"):
        encode_prompts(
            load_tokenizer(folder), [Example("a", "", (Message("user", "<new>"),), "", "", {})],
            max_prompt_tokens=9, num_ids=20,
        )  # fmt: skip
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace('"<" + message.role', '"<new><" + message.role'))
    for use in (talk, lambda: read_models(config)):
        with pytest.raises(ModelError, match=r"has 21 ids, but the embedding only 20 rows, .* reads '<new>' \(20\)"):
            use()


def test_a_turn_that_the_template_refuses_or_leaves_out_is_an_error_of_the_chat(folder, tmp_path):
    file = tmp_path / "chat_template.jinja"
    talk = Conversation(Trained(folder, None), temperature=1.0, max_response_tokens=2, seed=0)
    assert "".join(talk.ask("12")) is not None
    file.write_text("{{ raise_exception('one question only') if messages[1:] }}" + (whole := file.read_text()))
    limited = Conversation(Trained(folder, None), temperature=1.0, max_response_tokens=2, seed=0)
    "".join(limited.ask("1"))
    with pytest.raises(ModelError, match="do not fit the model's chat template: one question only"):
        "".join(limited.ask("2"))
    file.write_text(whole.replace("in messages", "in messages[-1:]"))
    forgetful = Conversation(Trained(folder, None), temperature=1.0, max_response_tokens=2, seed=0)
    "".join(forgetful.ask("1"))
    with pytest.raises(ModelError, match=r"leaves out the text of message 0 \(user\), '1'"):
        "".join(forgetful.ask("2"))


def test_a_response_that_nothing_could_end_is_refused(folder):
    with pytest.raises(ModelError, match=r"no response could end: the ids that end one are \[0"):
        stop_tokens(folder, load_tokenizer(folder), 0)


def test_a_template_that_has_no_generation_prompt_is_refused_where_answers_are_sampled(folder, tmp_path):
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().partition("{%- if add_generation_prompt")[0])
    keys = [f"model.path={folder}", f"data.train={folder}/x"]
    assert read_models(load_config("sft", keys).config)
    with pytest.raises(
        ModelError, match=r"writes '<assistant>' before each answer, and nothing where one is asked for"
    ):
        read_models(load_config("grpo", [*keys, "reward.function=exact"]).config)


def limit_of(*overrides: str) -> int:
    rows = ("data.max_prompt_tokens=40", "rollout.max_response_tokens=25")
    return RowLimits(num_ids=20, max_positions=64).max_data_tokens(load_config("digits", [*rows, *overrides]).config)


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
    limits = RowLimits.of(read_config(small_critic[2].split("=")[1], trust_remote_code=False), "the critic")
    with pytest.raises(ModelError, match="the critic supports rows of 32 tokens"):
        limits.max_data_tokens(load_config("digits", ["rollout.max_response_tokens=33"]).config)


def encoded(*texts: str):
    examples = [
        Example(
            name=f"train.jsonl:{line}",
            data_source="d",
            prompt=(Message("user", text.partition("=")[0]),),
            ability="",
            ground_truth=text.partition("=")[2],
            extra_info={},
        )
        for line, text in enumerate(texts, start=1)
    ]
    return encode_prompts(make_digits_tokenizer(), examples, max_prompt_tokens=8)


def notes_on(train, validation=None, *overrides: str) -> list[str]:
    own = ("data.generate=null", "data.train=a.jsonl", "reward.function=a.py:f")
    config = load_config("digits", [*own, "rollout.num_prompts=3", *overrides]).config
    return list(repetitions(config, encoded(*train), encoded(*validation) if validation else None))


def test_one_row_many_times_is_said_with_the_numbers():
    repeated, few = notes_on(["12=1"] * 64)
    assert repeated == ("63 of 64 prompts stand there before: the first is train.jsonl:2, the same as train.jsonl:1")
    assert (
        "rollout.num_prompts=3 prompts, and the data have only 1 that differ: every step samples the same ones 3" in few
    )


def test_repeated_prompts_with_other_answers_are_counted_and_distinct_ones_are_not_spoken_of():
    [said] = notes_on(["1=1", "2=2", "1=3", "3=3", "2=2"])
    assert "2 of 5 prompts stand there before: the first is train.jsonl:3, the same as train.jsonl:1; 1 of them" in said
    assert notes_on(["1=1", "2=2", "3=3"]) == []


def test_an_epoch_of_which_groups_are_replaced_is_said_to_take_more_prompts():
    epoch, replaces = "trainer.num_epochs=1", "rollout.dynamic_sampling=4"
    (said,) = notes_on(["1=1", "2=2", "3=3"], None, epoch, replaces)
    assert said.startswith("trainer.num_epochs=1 is of the prompts that are trained on")
    assert "data/epoch counts all passes" in said
    for keys in ((epoch,), (replaces,), (epoch, "rollout.dynamic_sampling=0")):
        assert notes_on(["1=1", "2=2", "3=3"], None, *keys) == []


def rows_of(*texts):
    """Return conversations, or pairs where a text has three parts, as token ids."""
    said = [text.split("=") for text in texts]
    examples = tuple(
        tuple(Talk((Message("user", asked), Message("assistant", answer)), 1) for answer in answers)
        for asked, *answers in said
    )
    given = Conversations(tuple(f"talks.jsonl:{place + 1}" for place in range(len(texts))), examples)
    tokenizer = make_digits_tokenizer()
    return encode_rows(tokenizer, given, stop_tokens=(tokenizer.eos_token_id,), max_row_tokens=64)


def test_conversations_and_pairs_that_occur_twice_or_are_validated_on_are_counted():
    config = load_config("sft", ["model.path=m", "data.train=a.jsonl", "data.num_examples=2"]).config
    assert list(repetitions(config, rows_of("1=1", "1=2", "2=1"), rows_of("2=2"))) == []
    assert list(repetitions(config, rows_of("1=1", "2=2", "1=1", "1=1"), rows_of("2=2", "3=3"))) == [
        "2 of 4 examples stand there before: the first is talks.jsonl:3, the same as talks.jsonl:1",
        "1 of 2 validation examples are trained on too: validation/loss will say more than is true",
    ]
    pairs = load_config("dpo", ["model.path=m", "data.train=a.jsonl", "data.num_examples=2"]).config
    assert list(repetitions(pairs, rows_of("1=2=3", "1=3=2", "1=23=3"), rows_of("1=2=33"))) == []
    _, again = repetitions(pairs, rows_of("1=2=3", "1=2=3"), rows_of("1=2=3"))
    assert again.endswith("validation/score will say more than is true")


def test_a_teacher_of_a_source_that_no_prompt_is_of_is_refused_with_the_sources_that_are_there():
    def check(train, *keys, validation=None):
        check_sources(load_config("opd", ["model.path=m", "data.train=a.jsonl", *keys]).config, train, validation)

    train = encoded("1=1", "2=2")
    math = dataclasses.replace(
        train, examples=tuple(dataclasses.replace(e, data_source="math") for e in train.examples)
    )
    check(math, "teacher.by_source={math: t}")
    check(math, "teacher.path=t")
    with pytest.raises(
        ConfigError, match=r"by_source\.maths='t': no prompt of data\.train has data_source 'maths'; did"
    ):
        check(math, "teacher.by_source={maths: t}")
    with pytest.raises(ConfigError, match=r"'xyz'; there are 'math'"):
        check(math, "teacher.by_source={xyz: t, math: t}", "teacher.path=t")
    check(dataclasses.replace(math, is_part=True), "teacher.by_source={xyz: t}")  # the rest may have it
    check(math, "teacher.by_source={math: t}", "reward.function=a.py:f", validation=train)
    check(math, "teacher.by_source={math: t}", "teacher.path=t", validation=train)
    with pytest.raises(
        ConfigError, match=r"data\.validation: no prompt of it has a teacher.* is 'd', and .* has math; set"
    ):
        check(math, "teacher.by_source={math: t}", validation=train)


def test_a_hint_without_a_right_answer_to_show_is_refused():
    def check(*keys):
        check_truths(load_config("opd", ["model.path=m", "data.train=a.jsonl", *keys]).config, encoded("1=1", "2="))

    check("teacher.path=t")
    check("teacher.hint='= {feedback}'", "reward.function=a.py:f")
    with pytest.raises(DataError, match=r"1 of 2 prompts have no ground truth, .*: the first is train\.jsonl:2; give"):
        check("teacher.hint='= {ground_truth}'")


def test_validation_prompts_that_are_trained_on_are_counted():
    [said] = notes_on(["1=1", "2=2", "3=3"], ["3=3", "4=4"])
    assert said.startswith("1 of 2 validation prompts are trained on too")
