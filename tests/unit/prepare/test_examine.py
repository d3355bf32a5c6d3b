"""What `--dry-run` and `rally train` read before anything is started."""

import asyncio
import itertools
import json
import shutil

import pytest
from chat_templates import QWEN3, make_chat_tokenizer
from grids import thinned
from tiny_models import make_tiny_model

from rallypoint.data import EncodedRows, chat_text, encode_prompts, load_tokenizer, save_tokenizer
from rallypoint.errors import ConfigError, DataError, ModelError, RewardError
from rallypoint.prepare.material import Material, examine, examine_dry
from rallypoint.prepare.preflight import load_checked
from rallypoint.run.folder import launched
from rallypoint.serving.codec import Codec

REWARD = "def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"


@pytest.fixture
def own(tmp_path):
    """Returns a function that loads a config of one's own model, data and reward, with changes."""
    make_tiny_model(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(REWARD)
    write(tmp_path / "train.jsonl", [{"prompt": "1" * (1 + n % 9), "ground_truth": "1"} for n in range(64)])
    keys = (
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/train.jsonl",
        f"reward.function={tmp_path}/rewards.py:f",
        "data.max_prompt_tokens=32",
        "rollout={num_prompts: 16, group_size: 2, max_response_tokens: 8}",
    )
    return Own(keys)


class Own:
    """Loads the config with changes."""

    def __init__(self, keys):
        self.keys = keys

    def __call__(self, *changes):
        return load_checked("grpo", [*self.keys, *changes]).config


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_dry_run_says_what_was_read(own):
    lines = examine_dry(own())
    assert "train          64 prompts, the longest of 11 tokens (data.max_prompt_tokens=32)" in lines
    assert any(line.endswith("rewards.py:f, which could be imported") for line in lines)
    assert "first prompt   train.jsonl:1, 3 tokens: '<user>1<assistant>'" in lines, lines
    assert any("only 9 that differ: every step samples the same ones 2 times" in line for line in lines)


NO_SCORES = {
    "'1.0'": "expected a number",
    "None": "returned None",
    "float('nan')": "expected a finite number",
    "[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]": "6",
    "{'scor': 1.0}": "score",
    "object()": "expected a number",
    "1e30": "expected at most",
}


@pytest.mark.parametrize(
    ("result", "look"),
    thinned(
        itertools.product(NO_SCORES, [examine_dry, examine]),
        *((result, examine_dry) for result in NO_SCORES),
        ("'1.0'", examine),
    ),
)
def test_a_dry_run_and_a_start_refuse_a_reward_that_returns_no_score(own, tmp_path, result, look):
    problem = NO_SCORES[result]
    (tmp_path / "rewards.py").write_text(REWARD.replace("0.0", result))
    with pytest.raises(RewardError, match=rf"train.jsonl:1: the reward .* '1', and gave no score: .*{problem}"):
        look(own())


@pytest.mark.parametrize(
    "reward",
    [
        "reward={function: judge, parameters: {url: 'http://127.0.0.1:9/v1', model: m}}",
        "reward={function: null, functions: [{name: b, function: FILE, parameters: {url: x}}]}",
    ],
)
def test_what_may_cost_money_is_not_asked_before_a_run(own, tmp_path, reward):
    asked = tmp_path / "asked"
    text = f"def f(data_source, solution_str, ground_truth, extra_info, url=None): open({str(asked)!r}, 'w')\n"
    (tmp_path / "rewards.py").write_text(text)
    examine(own(reward.replace("FILE", f"'{tmp_path}/rewards.py:f'")))
    assert not asked.exists()


def test_several_rewards_need_not_apply_to_the_first_row_as_it_is(own, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD.replace("0.0", "None"))
    file = f"{tmp_path}/rewards.py:f"
    examine(
        own(f"reward={{function: null, functions: [{{name: a, function: '{file}'}}, {{name: b, function: '{file}'}}]}}")
    )


def test_a_dry_run_does_not_refuse_a_reward_that_raises_on_a_form_of_answer(own, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD.replace("0.0", "1 / 0"))
    assert examine_dry(own())


def test_a_dry_run_shows_a_rendered_row_with_its_tokens_and_which_are_trained(own, tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "12" * 12, "ground_truth": "1"}])
    (tokens,) = (line for line in examine_dry(own()) if line.startswith("its tokens"))
    assert tokens.count("'1'") + tokens.count("'2'") == 14
    assert "... 10 more ..." in tokens
    write(tmp_path / "train.jsonl", [{"prompt": "12", "completion": "34"}])
    keys = (f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl", "data.max_row_tokens=32")
    lines = examine_dry(load_checked("sft", keys).config)
    assert any(line.startswith("first row      train.jsonl:1, 7 tokens: '") for line in lines), lines
    assert "trained        3 tokens: '34<eos>'" in lines, lines
    assert "steps          1, of 64 examples (trainer.num_epochs=1)" in lines, lines
    assert not any("times; lower" in line for line in lines), "a step of one example"
    lines = examine_dry(load_checked("sft", [*keys, "trainer.num_epochs=null"]).config)
    assert any("the data have only 1: it trains on them 64 times" in line for line in lines), lines
    lines = examine_dry(load_checked("sft", [*keys, "trainer.num_epochs=3"]).config)
    assert any("a step takes 3 examples (data.num_examples=64), and the data have only 1" in line for line in lines)


def test_examples_that_were_left_out_are_counted_and_the_first_is_named(own, tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": " "}])
    keys, rows = (
        (f"model.path={tmp_path}/model", "data.max_row_tokens=32"),
        f"path: {tmp_path}/train.jsonl, on_bad_row: drop",
    )
    found = examine(load_checked("sft", [*keys, f"data.train={{{rows}}}"]).config)
    said = "1 examples cannot be used and were dropped; the first is train.jsonl:2 (column completion: expected text"
    assert any(note.startswith(said) for note in found.notes), found.notes
    assert isinstance(found.train, EncodedRows)
    counts = Material("model", found.tokenizer, found.stop_tokens, found.train, None).counts()
    assert (counts["data/num_examples"], counts["data/num_dropped"]) == (1, 1)
    with pytest.raises(
        ConfigError, match=r"on_bad_row, by which rows are read and counted at the start, and stream_rows:"
    ):
        load_checked("sft", [*keys, f"data.train={{{rows}, stream_rows: 2}}"])
    with pytest.raises(ConfigError, match="on_bad_row, which is of conversations and pairs: leave it out"):
        own(f"data.train={{{rows}}}")


def test_what_the_template_leaves_out_is_said_and_tools_that_it_is_not_told_of_are_refused(own, tmp_path):
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("message.content", 'message.content.split("=")[-1]'))
    write(tmp_path / "train.jsonl", [{"prompt": "1", "completion": "2=3"}])
    keys = (f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl", "data.max_row_tokens=32")
    for look in (lambda config: examine(config).notes, examine_dry):
        said = "\n".join(look(load_checked("sft", keys).config))
        assert "leaves out or rewrites a part of 1 turns of the assistant, the first in train.jsonl:1: " in said
    write(tmp_path / "train.jsonl", [{"prompt": "1", "completion": "2=3", "tools": [{"name": "f"}]}])
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: .* does not tell the model of the tool 'f'; give a template of"
    ):
        examine(load_checked("sft", keys).config)


def test_right_answers_are_asked_for_where_something_reads_them(own, tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "12"}] * 64)
    with pytest.raises(DataError, match=r"column 'reward_model' is missing; found 'prompt' \(and 63 lines more\)"):
        examine_dry(own())
    keys = (f"model.path={tmp_path}/model", f"data.train={tmp_path}/train.jsonl", f"teacher.path={tmp_path}/model")
    sizes = ("data.max_prompt_tokens=32", "rollout={num_prompts: 16, max_response_tokens: 8}")
    assert examine_dry(load_checked("opd", [*keys, *sizes]).config)[0].startswith("train          64 prompts")
    with pytest.raises(DataError, match="column 'reward_model' is missing"):
        examine_dry(load_checked("opd", [*keys, *sizes, "teacher.hint='={ground_truth}'"]).config)


def test_of_a_large_data_set_a_dry_run_reads_a_part_and_says_so(own, tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": f"{n}", "ground_truth": "1"} for n in range(20_001)])
    assert examine_dry(own())[0].startswith("train          the first 20,000 prompts alone were read, the longest of 7")


@pytest.mark.parametrize("look", [examine, examine_dry])
def test_data_of_other_columns_and_text_that_is_unknown_are_found_before_a_start(own, tmp_path, look):
    write(tmp_path / "train.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    with pytest.raises(DataError, match="column 'prompt' is missing; 'question' may be it"):
        look(own())
    write(tmp_path / "train.jsonl", [{"prompt": "What is 1 + 1?", "ground_truth": "2"}])
    with pytest.raises(DataError, match="the tokenizer knows no token for 'W', 'h'"):
        look(own())


@pytest.mark.parametrize("look", [examine, examine_dry])
def test_a_tokenizer_without_a_template_is_found_before_a_start(own, tmp_path, look):
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        look(own())


@pytest.mark.parametrize("look", [examine, examine_dry])
def test_a_reward_file_whose_import_fails_is_found_before_a_start(own, tmp_path, look):
    (tmp_path / "rewards.py").write_text("import a_module_that_is_not_there\n" + REWARD)
    with pytest.raises(RewardError, match=r"(?s)rewards.py raised while it was imported.*a_module_that_is_not_there"):
        look(own())


def test_adapters_that_do_not_fit_the_model_are_refused_by_a_dry_run_as_by_the_run(own):
    for look in (examine, examine_dry):
        with pytest.raises(ModelError, match=r"model.lora.target_modules: 'q_porj' matches no linear layer .* q_proj"):
            look(own("model.lora={target_modules: [q_porj]}"))
        look(own("model.lora={target_modules: [q_proj]}"))


def test_the_end_of_a_turn_ends_a_response_also_where_the_folder_does_not_name_it(tmp_path, own):
    make_tiny_model(tmp_path / "base", tokenizer=make_chat_tokenizer(QWEN3, eos="<|endoftext|>"))
    generation = tmp_path / "base" / "generation_config.json"
    saved = json.loads(generation.read_text())["eos_token_id"]
    generation.unlink()
    write(tmp_path / "pairs.jsonl", [{"prompt": "1", "completion": "2"}])
    ours = own(f"model.path={tmp_path}/base")
    keys = (f"model.path={tmp_path}/base", f"data.train={tmp_path}/pairs.jsonl", "data.max_row_tokens=32")
    for config in (ours, load_checked("sft", keys).config):
        found = examine(config)
        assert found.tokenizer.convert_ids_to_tokens(list(found.stop_tokens)) == ["<|endoftext|>", "<|im_end|>"]
        assert sum("ends a turn with '<|im_end|>', which" in note for note in found.notes) == 1, found.notes
    assert set(saved) == set(found.stop_tokens), "who samples from what was saved stops there, too"


def test_a_resumed_run_shows_the_time_of_its_start(tmp_path, own):
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text("{{ strftime_now('%S') }}" + template.read_text())
    loaded = load_checked("grpo", own.keys)
    found = examine(loaded.config)
    assert found.clock is not None
    begun = found.dated(loaded)
    assert f'data.template.strftime_now="{found.clock}"' in launched(begun).overrides
    again = load_checked("grpo", launched(begun).overrides)
    assert again.config.data.template == begun.config.data.template == {"strftime_now": found.clock}
    assert examine(again.config).train.token_ids == found.train.token_ids
    assert examine(again.config).clock is None


def test_arguments_of_the_template_reach_the_prompts(tmp_path, own):
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking is not defined %}={% endif %}")
    first = "first prompt   train.jsonl:1, "
    assert any(line.startswith(f"{first}4 tokens: '<user>1<assistant>='") for line in examine_dry(own()))
    lines = examine_dry(own("data.template={enable_thinking: false}"))
    assert any(line.startswith(f"{first}3 tokens: '<user>1<assistant>'") for line in lines), lines


@pytest.mark.parametrize(
    "change",
    [
        "data.template={enable_thinking: false, tone: '7='}",
        "data.template={strftime_now: '2026-01-31T12:00:59'}",
        "model.tokenizer={chat_template: OTHER}",
    ],
)
def test_a_saved_model_is_asked_by_eval_chat_and_serve_as_it_was_in_training(tmp_path, own, change):
    template, other = tmp_path / "model" / "chat_template.jinja", tmp_path / "other.jinja"
    other.write_text("=" + template.read_text())
    asked = "{% if enable_thinking is not defined %}={% endif %}{{ tone }}{{ strftime_now('%S') }}"
    template.write_text(template.read_text() + asked)
    found = examine(own(change.replace("OTHER", str(other))))
    shutil.copytree(tmp_path / "model", saved := tmp_path / "saved")
    save_tokenizer(found.tokenizer, saved)
    tokenizer = load_tokenizer(saved, trust_remote_code=False)
    for number in (0, 7):
        (turn,), ids = found.train.examples[number].prompt, found.train.token_ids[number]
        asked = [{"role": turn.role, "content": turn.content}]
        text = chat_text(tokenizer, asked)  # as `rally chat`
        assert tuple(tokenizer.encode(text, add_special_tokens=False)) == ids
        assert asyncio.run(Codec(tokenizer).encode_chat(asked, max_tokens=32)) == ids
    evaluated = encode_prompts(tokenizer, found.train.examples, max_prompt_tokens=32)
    assert evaluated.token_ids == found.train.token_ids


@pytest.mark.parametrize(("num_epochs", "num_steps"), [(1, 4), (0.1, 1), (1.4, 5), (2, 8)])
def test_epochs_of_prompts_are_whole_steps_and_never_more_than_was_asked_for(own, tmp_path, num_epochs, num_steps):
    write(tmp_path / "train.jsonl", [{"prompt": str(n), "ground_truth": "1"} for n in range(67)])
    config = own(f"trainer.num_epochs={num_epochs}")
    assert examine(config).settled(config).trainer.num_steps == num_steps
