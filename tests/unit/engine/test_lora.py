"""Three steps of adapters with our engine: those of autograd on merged weights, and those of PEFT."""

import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from rallypoint.config import LoRAConfig, OptimizerConfig
from rallypoint.engine import TrainingEngine
from rallypoint.engine.forward import TokenStream
from rallypoint.model_files import load_policy
from rallypoint.models import lm_head
from rallypoint.models.lora import adapted_layers
from rallypoint.models.norm import replace_norms
from rallypoint.types import Metrics

CONFIG = OptimizerConfig(lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=1e9)
# A large eps keeps Adam's division well conditioned: noise in a gradient of zero is not blown up to a step of lr.
EPS = 1e-4
LORA = LoRAConfig(rank=3, alpha=5.0, rslora=True)
NUM_STEPS = 3


@pytest.fixture
def policy(make_folder):
    """A float64 policy with adapters that are not zero."""
    model = load_policy(make_folder(), dtype="float64", lora=LORA, seed=7)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.trained().values():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


@pytest.fixture
def rows(make_batch):
    return make_batch([9, 2, 17, 6])


def objective(logits, tokens, weights):
    """Of one row: a weighted sum of the logprobs of its trained tokens."""
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:].unsqueeze(-1)).squeeze(-1)
    return -(logprobs * weights[1:]).sum()


def by_rows(batch, logits_of):
    weights = (batch.advantages * batch.loss_mask).double()
    bounds = list(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True))
    parts = [objective(logits_of(batch.tokens[a:b]), batch.tokens[a:b], weights[a:b]) for a, b in bounds]
    return sum(parts) / batch.num_loss_tokens


def adamw(weights):
    return torch.optim.AdamW(weights, lr=CONFIG.lr, betas=CONFIG.betas, eps=EPS, weight_decay=CONFIG.weight_decay)


def engine_steps(shard, batch):
    """Train with our engine on packed rows and return the adapters."""

    model = shard.model

    def loss(part, at):
        stream = TokenStream(shard, part, at)
        logprobs = lm_head(model)(stream.join(stream.states())).log_softmax(-1)
        taken = logprobs.gather(-1, part.tokens[at].unsqueeze(-1)).squeeze(-1)
        return -(taken * part.advantages[at]).sum(), Metrics({})

    engine = TrainingEngine(shard, optimizer=CONFIG, eps=EPS, max_tokens_per_micro_batch=20)
    for step in range(1, NUM_STEPS + 1):
        engine.train(batch, loss, denominator=batch.num_loss_tokens, step=step, num_steps=NUM_STEPS)
    return {name: weight.detach().clone() for name, weight in shard.trained().items()}


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        torch.testing.assert_close(
            ours[name], wanted, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name} {text}"
        )


def test_steps_are_those_of_autograd_through_merged_weights(policy, rows, make_folder):
    plain = load_policy(make_folder(), dtype="float64").model
    plain.set_attn_implementation("sdpa")
    frozen = {name: weight.detach() for name, weight in plain.named_parameters()}
    layers = adapted_layers(policy.model)
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in policy.trained().items()}
    optimizer = adamw(weights.values())
    for _ in range(NUM_STEPS):
        merged = {
            f"{name}.weight": frozen[f"{name}.weight"]
            + LORA.alpha / LORA.rank**0.5 * weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"]
            for name in layers
        }
        optimizer.zero_grad()
        logits = lambda row, all_=frozen | merged: functional_call(  # noqa: E731
            plain, all_, (row.unsqueeze(0),), {"use_cache": False}
        ).logits[0]
        by_rows(rows, logits).backward()
        optimizer.step()
    assert_close(engine_steps(policy, rows), {name: weight.detach() for name, weight in weights.items()})


def test_steps_are_those_of_peft(policy, rows, make_folder):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(make_folder(), attn_implementation="sdpa", dtype=torch.float64)
    replace_norms(base)  # transformers rounds what a norm of a float64 model returns to float32
    options = peft.LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, options)
    names = {
        name.removeprefix("base_model.model.").replace(".default", ""): weight
        for name, weight in theirs.named_parameters()
        if weight.requires_grad
    }
    with torch.no_grad():
        for name, weight in policy.trained().items():
            names[name].data = weight.detach().clone()
    optimizer = adamw(names.values())
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        by_rows(rows, lambda row: theirs(row.unsqueeze(0), use_cache=False).logits[0]).backward()
        optimizer.step()
    assert_close(engine_steps(policy, rows), {name: weight.detach() for name, weight in names.items()})
