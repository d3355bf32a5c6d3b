"""An agent of the user's whose rollouts are sampled by a real vLLM server: what the same episode samples in process."""

import pytest
from asking_twice import ROWS, TWICE, in_process
from tiny_models import make_tiny_model

import rallypoint as rally

pytest.importorskip("openai")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("installed")
def test_an_agent_trains_on_what_a_server_samples_and_that_is_what_the_episode_in_process_does(tmp_path):
    sizes = {"hidden_size": 64, "num_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    make_tiny_model(tmp_path / "model", max_positions=256, **sizes)
    (tmp_path / "agent.py").write_text(TWICE)
    usual = {"num_prompts": 4, "group_size": 4, "num_steps": 3, "lr": 1e-3, "max_response_tokens": 24}
    usual |= {"model": tmp_path / "model", "data": ROWS, "runs_dir": tmp_path / "runs", "display": False}
    config = {"rollout.engine": "vllm", "data.max_prompt_tokens": 16, "reward.function": None}
    over_http, in_here = (
        rally.train("grpo", name=name, episode=episode, config=config, **usual)
        for name, episode in (("http", f"{tmp_path / 'agent.py'}:run"), ("here", in_process))
    )
    for run in (over_http, in_here):
        steps = [row for row in run.metrics if "reward/mean" in row]
        assert len(steps) == 3
        assert all(row["rollout/failed"] == 0 and row["rollout/logprob_gap_max"] < 1e-3 for row in steps)
        assert all(row["rollout/num_turns"] == 2 for row in steps)
    for there, here in zip(over_http.rollouts(1), in_here.rollouts(1), strict=True):
        assert there["response_ids"] == here["response_ids"]
        assert there["loss_mask"] == here["loss_mask"]
        assert there["rollout_logprobs"] == pytest.approx(here["rollout_logprobs"], abs=1e-5)
