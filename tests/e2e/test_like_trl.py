"""Three steps beside TRL's trainers on the same rows: losses, gradient norms and margins (benchmarks/trl_cases.py)."""

import json
from pathlib import Path

import pytest
import torch
from metrics_file import read_metrics
from sine_models import make_sine_model
from tiny_runs import Runs

from rallypoint.algorithms.distillation import top_divergence

FOUND = json.loads((Path(__file__).parent / "trl_cases.json").read_text())
OPTIMIZER = f"{{lr: {FOUND['lr']}, schedule: constant, warmup_ratio: 0, betas: [0.9, 0.999]}}"


@pytest.mark.parametrize("name", FOUND["cases"])
def test_three_steps_are_those_of_trl(tmp_path, name):
    case = FOUND["cases"][name]
    model, _ = make_sine_model(tmp_path / "model", scores=case["recipe"] == "reward_model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case["rows"]))
    keys = [
        f"model.path={model}",
        f"data={{train: {tmp_path}/rows.jsonl, num_examples: {len(case['rows'])}, max_row_tokens: 32}}",
        f"trainer={{num_steps: 3, num_epochs: null, runs_dir: {tmp_path}, name: run}}",
        f"actor.optimizer={OPTIMIZER}",
        "cluster={runtime: inline, pools: {main: [1]}}",
    ]
    if case["recipe"] == "dpo":
        (loss,) = case["options"]["loss_type"]
        keys.append(f"preference={{name: {loss}, beta: {case['options']['beta']}}}")
    run = Runs(tmp_path).run_with(case["recipe"], keys)
    steps = [record for record in read_metrics(run.metrics) if "actor/loss" in record]
    for metric in ("loss", "grad_norm"):
        assert [step[f"actor/{metric}"] for step in steps] == pytest.approx(case["trl"][metric], rel=2e-4), metric
    if name in ("reward model", "dpo sigmoid 0.1"):  # of the others TRL's margins are sums, ours are what is compared
        assert [step["actor/margin"] for step in steps] == pytest.approx(case["trl"]["margin"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", FOUND["divergences"]["found"])
def test_divergences_over_the_likeliest_tokens_are_those_of_trl(name):
    """TRL's server distillation adds a class of all other tokens, too (`loss_add_tail`)."""
    cases = FOUND["divergences"]
    leaf = torch.tensor(cases["logits"], dtype=torch.float64, requires_grad=True)
    top = torch.tensor(cases["teacher"], dtype=torch.float64).topk(3, dim=1)
    found = top_divergence(name, leaf.log_softmax(1).gather(1, top.indices), top.values)
    found.sum().backward()
    assert found.tolist() == pytest.approx(cases["found"][name]["values"], rel=1e-9)
    torch.testing.assert_close(leaf.grad, torch.tensor(cases["found"][name]["gradient"], dtype=torch.float64))
