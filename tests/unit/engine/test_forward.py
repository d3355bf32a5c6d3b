"""Logprobs, entropies and values against a float64 loop over tokens and the plain transformers model."""

import dataclasses
import math
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from rallypoint.engine import TrainingEngine, critic_values, policy_outputs
from rallypoint.engine.forward import TokenStream, trained_positions
from rallypoint.errors import RowTooLongError
from rallypoint.model_files import load_critic, load_policy
from rallypoint.models import ModelShard

LENGTHS = [6, 1, 13, 0, 30, 2, 7]


def engine_of(model, cap, padded=False):
    return TrainingEngine(ModelShard.whole(model), optimizer=None, max_tokens_per_micro_batch=cap, padded=padded)


def token_by_token(folder, batch, temperature):
    """(logprobs, entropies) of every token by plain floats; 0 where there is nothing to say."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float64).eval()
    logprobs, entropies = [0.0] * batch.num_tokens, [0.0] * batch.num_tokens
    for row in range(len(batch)):
        start, stop = batch.offsets[row : row + 2].tolist()
        for t in range(start + 1, stop):
            if not batch.loss_mask[t]:
                continue
            with torch.no_grad():
                logits = model(batch.tokens[start:t].unsqueeze(0)).logits[0, -1].tolist()
            weights = [math.exp(logit / temperature) for logit in logits]
            shares = [weight / math.fsum(weights) for weight in weights]
            logprobs[t] = math.log(shares[int(batch.tokens[t])])
            entropies[t] = -math.fsum(share * math.log(share) for share in shares if share)
    return torch.tensor(logprobs), torch.tensor(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logprobs_and_entropies_equal_a_loop_over_tokens(make_folder, make_batch, architecture, temperature):
    folder, batch = make_folder(architecture), make_batch(LENGTHS)
    engine = engine_of(load_policy(folder, dtype="float32").model, 32)
    expected = token_by_token(folder, batch, temperature)
    for name, wanted in zip(("logprobs", "entropy"), expected, strict=True):
        actual = engine.evaluate(
            batch, lambda part, at, name=name: getattr(policy_outputs(engine.shard, part, at, temperature), name)
        )
        torch.testing.assert_close(actual.values, wanted, rtol=1e-4, atol=1e-5)
        assert (actual.values[~batch.loss_mask] == 0).all()


def test_values_are_of_the_state_in_which_each_token_was_chosen(make_folder, make_batch):
    critic = load_critic(make_folder(), dtype="float32").model
    with torch.no_grad():
        critic.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    batch = make_batch(LENGTHS)
    engine = engine_of(critic, 64)
    values = engine.evaluate(batch, lambda part, at: critic_values(engine.shard, part, at)).values
    critic.set_attn_implementation("eager")
    for row in range(len(batch)):
        start, stop = batch.offsets[row : row + 2].tolist()
        for t in range(start + 1, stop):
            with torch.no_grad():
                expected = critic(batch.tokens[start:t].unsqueeze(0)).logits[0, -1, 0] if batch.loss_mask[t] else 0.0
            assert values[t] == pytest.approx(float(expected), rel=1e-4, abs=1e-4)


def test_values_of_a_critic_in_bfloat16_are_finer_than_bfloat16(make_folder, make_batch):
    critic = load_critic(make_folder(), dtype="bfloat16").model
    with torch.no_grad():
        critic.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    batch = make_batch(LENGTHS)
    engine = engine_of(critic, 64)
    values = engine.evaluate(batch, lambda part, at: critic_values(engine.shard, part, at)).values[batch.loss_mask]
    assert values.dtype == torch.float32
    assert (values != values.bfloat16().float()).float().mean() > 0.9


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cap", [30, 31, 37, 59, 1000])
def test_numbers_come_back_in_the_order_of_the_batch_for_every_cap(make_policy, make_batch, cap, padded):
    engine = engine_of(make_policy(), cap, padded)
    for seed in range(5):
        lengths = [LENGTHS[i] for i in torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(seed))]
        batch = make_batch(lengths, seed=seed, masked_rows=[seed])
        sizes = []

        def advantage(part, at, sizes=sizes):
            sizes.append(part.num_tokens)
            return part.advantages[at]

        values = engine.evaluate(batch, advantage)
        assert torch.equal(values.values, torch.where(batch.loss_mask, batch.advantages, 0.0))
        assert torch.equal(values.offsets, batch.offsets)
        assert max(sizes) <= cap


def test_logprobs_do_not_depend_on_the_cap(make_policy, make_batch):
    model, batch = make_policy(torch.float32), make_batch(LENGTHS)
    shard = ModelShard.whole(model)
    by_cap = [
        engine_of(model, cap).evaluate(batch, lambda part, at: policy_outputs(shard, part, at, 1.0).logprobs).values
        for cap in (30, 40, 1000)
    ]
    for other in by_cap[1:]:
        torch.testing.assert_close(other, by_cap[0], rtol=1e-5, atol=1e-6)


def test_last_tokens_which_choose_nothing_do_not_pass_through_the_model(make_policy, make_batch):
    model, batch = make_policy(torch.float32), make_batch([2, 5, 9])
    seen = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    engine_of(model, 100).evaluate(
        batch, lambda part, at: policy_outputs(ModelShard.whole(model), part, at, 1.0).logprobs
    )
    rows = batch.tokens.split([2, 5, 9])
    assert torch.equal(torch.cat(seen, 1).squeeze(0), torch.cat([row[:-1] for row in rows]))


def test_passes_in_bfloat16_on_a_cpu_have_few_numbers_of_tokens_and_never_more_than_their_rows(make_folder, make_batch):
    model = load_policy(make_folder(), dtype="bfloat16").model
    shard, seen, chosen = ModelShard.whole(model), [], set()
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    for seed in range(20):
        lengths = torch.randint(3, 30, (20,), generator=torch.Generator().manual_seed(seed)).tolist()
        batch, most = make_batch(lengths, seed=seed), sum(lengths)
        at = trained_positions(batch)
        stream = TokenStream(shard, batch, at)
        chosen.add(len(stream.states()))
        assert len(stream.join(stream.states())) == len(at) <= len(stream.targets()) <= most
        assert seen[-1] <= most
    assert len(set(seen)) < 10
    assert len(chosen) < 10
    assert not any(num % 8 for num in chosen.union(seen))


def test_filler_changes_neither_what_a_policy_says_nor_its_gradients(make_folder, make_batch):
    def outcome(dtype):
        model = load_policy(make_folder(), dtype="float32").model.to(torch.bfloat16).to(dtype)
        with torch.no_grad():
            model.get_input_embeddings().weight[0] = float("inf")  # nobody has this token
        model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
        outputs = policy_outputs(ModelShard.whole(model), batch, at, 1.0)
        (outputs.logprobs * batch.advantages[at]).sum().backward()
        return outputs.logprobs, {name: weight.grad.float() for name, weight in model.named_parameters()}

    seen: list[int] = []
    batch = make_batch([5, 8, 3, 12, 14] * 4)
    at = trained_positions(batch)
    batch = dataclasses.replace(batch, tokens=batch.tokens.clamp(min=1))
    (half, half_gradients), (full, gradients) = outcome(torch.bfloat16), outcome(torch.float32)
    assert seen == [152, 148]
    torch.testing.assert_close(half, full, rtol=0.02, atol=0.05)
    for name, wanted in gradients.items():
        assert (half_gradients[name] - wanted).norm() <= 0.05 * wanted.norm(), name


@pytest.mark.parametrize("lengths", [[], [0, 1, 1]], ids=["no rows", "single tokens"])
def test_a_stream_that_chooses_nothing_gives_no_states(make_policy, make_batch, lengths):
    nowhere = torch.zeros(0, dtype=torch.int64)
    assert len(TokenStream(ModelShard.whole(make_policy()), make_batch(lengths), nowhere).states()) == 0


def test_evaluating_makes_no_gradients_and_asks_nothing_of_rows_that_are_not_trained(make_policy, make_batch):
    batch = make_batch([4, 5], masked_rows=[0, 1])
    values = engine_of(make_policy(), 5).evaluate(batch, lambda part, at: pytest.fail("nothing is trained"))
    assert values.values.tolist() == [0.0] * 9
    assert not values.values.requires_grad


def test_a_batch_without_rows_gives_no_numbers(make_policy, make_batch):
    assert len(engine_of(make_policy(), 5).evaluate(make_batch([]), lambda part, at: pytest.fail("no rows"))) == 0


def test_a_row_over_the_cap_is_named(make_policy, make_batch):
    batch = make_batch(LENGTHS)
    batch.prompt_index[4], batch.sample_index[4] = 7, 3
    with pytest.raises(RowTooLongError, match="row 4 has 30 tokens, but a micro-batch may hold 29") as raised:
        engine_of(make_policy(), 29).evaluate(batch, lambda part, at: part.advantages[at])
    assert str(pickle.loads(pickle.dumps(raised.value))).endswith("it is sample 3 of prompt 7")


def test_a_first_token_cannot_be_trained(make_batch):
    batch = make_batch([0, 3, 2])
    batch.loss_mask[3] = True
    with pytest.raises(ValueError, match="first token of a row"):
        trained_positions(batch)
