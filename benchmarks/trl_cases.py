"""What TRL's trainers compute for a few rows: the cases that tests/e2e/test_like_trl.py compares our runs with.

In an environment with TRL and rallypoint (only its digits tokenizer is used):

    pip install trl==1.16.0
    PYTHONPATH=tests/shared python benchmarks/trl_cases.py tests/e2e/trl_cases.json

Each case is three steps of AdamW on all its rows at once, in float32 on a CPU: the loss before each step and the norm
of its gradient. The models' weights are sines (tests/shared/sine_models.py), so that no file is needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from sine_models import make_sine_model

LR, NUM_STEPS = 1e-2, 3


def said(role: str, content: str) -> dict[str, str]:
    """Return a message."""
    return {"role": role, "content": content}


TALKS = [
    [said("user", "31"), said("assistant", "13"), said("user", "2"), said("assistant", "2")],
    [said("user", "907"), said("assistant", "079")],
    [said("system", "="), said("user", "4"), said("assistant", "4")],
]
ANSWERS = [("31", "13"), ("907", "079"), ("4", "4"), ("5512", "1255")]
PAIRS = [("31", "13", "31"), ("907", "079", "7"), ("4", "4", "8 8"), ("5512", "1255", "5")]

CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "sft of messages": ("sft", {"assistant_only_loss": True}, [{"messages": talk} for talk in TALKS]),
    "sft of completions": (
        "sft",
        {},
        [{"prompt": [said("user", a)], "completion": [said("assistant", b)]} for a, b in ANSWERS],
    ),
    **{
        f"dpo {name} {beta}": (
            "dpo",
            {"loss_type": [name], "beta": beta},
            [
                {"prompt": [said("user", a)], "chosen": [said("assistant", b)], "rejected": [said("assistant", c)]}
                for a, b, c in PAIRS
            ],
        )
        for name, beta in (("sigmoid", 0.1), ("sigmoid_norm", 2.0), ("ipo", 0.4))
    },
    "reward model": (
        "reward_model",
        {"center_rewards_coefficient": None},
        [
            {
                "chosen": [said("user", a), said("assistant", b)],
                "rejected": [said("user", a), said("assistant", c)],
            }
            for a, b, c in PAIRS
        ],
    ),
}
TRAINERS = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "reward_model": (trl.RewardTrainer, trl.RewardConfig),
}


def run(recipe: str, options: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Train for three steps, and return what was logged of each."""
    trainer_class, config_class = TRAINERS[recipe]
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = make_sine_model(Path(folder) / "model", scores=recipe == "reward_model")
        config = config_class(
            output_dir=folder,
            per_device_train_batch_size=len(rows),
            max_steps=NUM_STEPS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.999,
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=1,
            logging_strategy="steps",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            seed=0,
            **options,
        )
        auto = transformers.AutoModelForSequenceClassification if recipe == "reward_model" else None
        loaded = (auto or transformers.AutoModelForCausalLM).from_pretrained(model, dtype=torch.float32)
        trainer = trainer_class(
            model=loaded, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = {"loss": "loss", "grad_norm": "grad_norm", "rewards/margins": "margin", "margin": "margin"}
    return {ours: [entry[name] for entry in logs] for name, ours in names.items() if name in logs[0]}


def divergences() -> dict[str, Any]:
    """Return divergences over a teacher's three likeliest of seven tokens and one class of the others, row by row."""
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

    places = torch.arange(28, dtype=torch.float64).reshape(4, 7)
    logits, teacher = 2 * (1 + places).sin(), (2 * (3 + 1.7 * places).cos()).log_softmax(-1)
    top = teacher.topk(3, dim=-1)
    found: dict[str, Any] = {}
    for name, beta in (("forward", 0), ("reverse", 1)):
        leaf = logits.clone().requires_grad_()
        mask = torch.ones_like(top.values, dtype=torch.bool)
        student, mask = _add_tail_bucket(leaf.log_softmax(-1).gather(-1, top.indices), mask)
        values = _jsd_divergence(student, _add_tail_bucket(top.values, mask[..., :3])[0], beta, mask).sum(-1)
        values.sum().backward()
        assert leaf.grad is not None
        found[name] = {"values": values.tolist(), "gradient": leaf.grad.tolist()}
    return {"logits": logits.tolist(), "teacher": teacher.tolist(), "found": found}


def main() -> None:
    """Write all cases as JSON."""
    found = {
        name: {"recipe": recipe, "options": options, "rows": rows, "trl": run(recipe, options, rows)}
        for name, (recipe, options, rows) in CASES.items()
    }
    made_with = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    text = json.dumps({"made_with": made_with, "lr": LR, "divergences": divergences(), "cases": found}, indent=1)
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
