"""Which sampled tokens nobody sees, and what is measured of episodes."""

import pytest
import torch
from chat_templates import QWEN3, make_chat_tokenizer
from tokenizers import AddedToken

from rallypoint.environments.scored import Scored
from rallypoint.sampling.sampled import measure, measure_episodes, shown_tokens
from rallypoint.types import Metrics, RolloutBatch, Trajectory, Turn, merge


def test_tokens_without_a_text_are_hidden_whether_they_are_named_special_or_belong_to_nothing():
    tokenizer = make_chat_tokenizer(QWEN3)
    tokenizer.add_tokens([AddedToken("<tool>", special=True), AddedToken("<word>", special=False)])
    stops = [tokenizer.convert_tokens_to_ids("<|im_end|>"), len(tokenizer) + 3]
    is_shown = shown_tokens(tokenizer, stops).tolist()
    assert len(is_shown) == len(tokenizer) + 4
    for token, shown in enumerate(is_shown):
        text = tokenizer.decode([token], skip_special_tokens=True) if token < len(tokenizer) else ""
        assert shown == (bool(text) or token in stops), token


def test_tokens_that_a_response_does_not_show_are_measured():
    tokenizer = make_chat_tokenizer(QWEN3)
    tokenizer.add_tokens([AddedToken("<tool>", special=True)])
    stop, tool = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<tool>"))
    tokens = torch.tensor([5, 6, tool, len(tokenizer) + 9, stop])
    rows = RolloutBatch(
        offsets=torch.tensor([0, 5]),
        tokens=tokens,
        loss_mask=torch.tensor([False, True, True, True, True]),
        rollout_logprobs=torch.zeros(5),
        prompt_index=torch.tensor([0]),
        sample_index=torch.tensor([0]),
        versions=torch.tensor([0]),
        truncated=torch.tensor([False]),
    )
    scored = Scored(rows.scored(torch.zeros(5)), (0,), (), ({},), (None,), Metrics())
    found = measure(rows, scored, num_failed=0, is_shown=shown_tokens(tokenizer, [stop]))
    assert found.scalars()["rollout/hidden_tokens"] == 2 / 4, "<tool>, and what belongs to nothing"


def rollout(*lengths, added=2, own_s=1.0, calls=0, errors=0):
    turns = [
        Turn(prompt=(1,) * added, response=(2,) * n, logprobs=(), sampled_logprobs=(), version=0, truncated=False)
        for n in lengths
    ]
    return Trajectory(turns=tuple(turns), own_s=own_s, num_tool_calls=calls, num_tool_errors=errors)


ROLLOUTS = [rollout(4), rollout(3, 5, own_s=4.0, calls=3, errors=1), rollout(*[1] * 10, calls=1), rollout(2, 2)]


def test_turns_and_tools_of_episodes_are_measured():
    found = measure_episodes(ROLLOUTS, []).scalars()
    assert found["rollout/num_turns"] == 15 / 4
    assert found["rollout/num_turns_max"] == 10
    assert found["rollout/turn_length"] == 26 / 15
    assert [found.get(f"rollout/turn_length/{number}") for number in (1, 2, 3, 8, 9)] == [2.5, 8 / 3, 1, 1, None]
    assert found["rollout/added_tokens"] == 2 * 11 / 4, "without the prompt"
    assert (found["rollout/environment_s"], found["rollout/environment_s_max"]) == (7 / 4, 4)
    assert (found["rollout/tool_calls"], found["rollout/tool_errors"]) == (1, 1 / 4)
    assert "rollout/tool_errors" not in measure_episodes(ROLLOUTS[:1], [])
    assert "rollout/num_turns" not in measure_episodes([], [])


@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_what_is_measured_of_parts_is_what_is_measured_of_all(cut):
    parts = merge(measure_episodes(ROLLOUTS[:cut], []), measure_episodes(ROLLOUTS[cut:], []))
    assert parts.scalars() == measure_episodes(ROLLOUTS, []).scalars()
