"""The plan's numbers, against real models and against examples done by hand."""

import weakref
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3MoeConfig

from rallypoint.config import RunConfig, load_config
from rallypoint.config.sections.material import CreateModelConfig
from rallypoint.config.shape import ModelShape, read_shape
from rallypoint.data import make_digits_tokenizer
from rallypoint.families.kinds import MLP, Attention, Layers
from rallypoint.model_files import create_model, load_critic, load_policy
from rallypoint.models import PackedRows, trained_weights
from rallypoint.observability.flops import flops_of
from rallypoint.prepare.plan import attention_cost, make_plan
from rallypoint.types import offsets_from_lengths


def load(*overrides: str) -> RunConfig:
    return load_config("base.yaml", overrides).config


def num_parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make_model(folder: Path, made: CreateModelConfig, *, tied: bool = False) -> None:
    sizes = made.model_dump()
    create_model(folder, make_digits_tokenizer(), max_positions=16, seed=0, tie_embeddings=tied, **sizes)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_of_the_plan_are_those_of_the_model(here: Path, architecture: str, tied: bool):
    sizes = "hidden_size: 48, num_layers: 3, num_heads: 6, num_key_value_heads: 2, intermediate_size: 80"
    created = load(f"model.create={{architecture: {architecture}, {sizes}}}")
    make_model(here / "model", created.model.create, tied=tied)
    plan = make_plan(load("model.create=null", f"model.path={here / 'model'}"))
    actor = AutoModelForCausalLM.from_pretrained(here / "model")
    critic = AutoModelForTokenClassification.from_pretrained(here / "model", num_labels=1)
    assert plan.num_parameters == num_parameters(actor)
    weights = {memory.role: memory.weights for memory in plan.memory}
    assert weights == {
        "actor": 4 * num_parameters(actor),
        "rollout": 0,  # samples from the actor's own
        "reference": 4 * num_parameters(actor),
        "critic": 4 * num_parameters(critic),
    }
    if not tied:
        from_config = make_plan(created)
        assert from_config.num_parameters == plan.num_parameters
        assert from_config.memory == plan.memory


@pytest.mark.parametrize("layers", ["all-linear", "[v_proj, mlp.down_proj]"])
def test_with_adapters_only_they_have_gradients_and_the_reference_shares_the_rest(here: Path, layers: str):
    config = load(f"model.lora={{rank: 3, target_modules: {layers}}}")
    made, lora = config.model.create, config.model.lora
    make_model(here / "model", made)
    actor = load_policy(str(here / "model"), dtype="float32", lora=lora).model
    critic = load_critic(str(here / "model"), dtype="float32", lora=lora).model
    adapters, trained = (sum(w.numel() for w in trained_weights(model).values()) for model in (actor, critic))
    memory = {memory.role: memory for memory in make_plan(config).memory}
    assert {role: m.weights for role, m in memory.items()} == {
        "actor": 4 * num_parameters(actor),
        "rollout": 0,
        "reference": 4 * adapters,
        "critic": 4 * num_parameters(critic),
    }
    assert {role: m.gradients for role, m in memory.items() if m.gradients} == {
        "actor": 4 * adapters,
        "critic": 4 * trained,
    }
    assert memory["actor"].optimizer == 2 * 4 * adapters


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}], ids=str)
def test_the_parameters_of_a_mixture_are_those_of_the_model(here: Path, changes: dict):
    model = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=24,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            **changes,
        )
    )
    model.config.save_pretrained(here / "mixture")
    shape = read_shape(here / "mixture")
    assert shape.num_parameters == num_parameters(model)
    assert shape.attention_cost == pytest.approx(flops_of(model).attention_cost)


def test_batches_by_hand(here: Path):
    # 8 prompts x 4 = 32 rows of at most 8 + 8 tokens; 4 mini-batches of 8 rows; 4 rows on each of 2 ranks; 4 rows of
    # 16 tokens fill a micro-batch of 64.
    plan = make_plan(load())
    assert (plan.num_prompts, plan.group_size, plan.num_rows, plan.max_tokens) == (8, 4, 32, 512)
    assert plan.updates == {"actor": (4, 8, 1), "critic": (4, 8, 1)}


def test_batches_that_do_not_divide_by_hand(here: Path):
    # 5 x 3 = 15 rows; 4 mini-batches of at most 4 rows, twice over; 3 ranks with at most 2 rows; a micro-batch of 31
    # tokens holds 1 row of 16. The critic: 1 mini-batch of 15 rows, 5 on each rank.
    plan = make_plan(
        load(
            "rollout={num_prompts: 5, group_size: 3}",
            "actor={num_epochs: 2, num_mini_batches: 4}",
            "critic.num_mini_batches=1",
            "cluster.pools.main=[2, 1]",
            "engine.max_tokens_per_micro_batch=31",
        )
    )
    assert (plan.num_rows, plan.max_tokens) == (15, 240)
    assert plan.updates == {"actor": (8, 4, 2), "critic": (1, 15, 5)}


def test_memory_by_hand(here: Path):
    plan = make_plan(load("model.dtype=bfloat16", "rollout.max_batch_rows=8", "validation.max_prompts=2"))
    by_role = {memory.role: memory for memory in plan.memory}
    actor, rollout, reference = by_role["actor"], by_role["rollout"], by_role["reference"]
    assert actor.weights == 2 * plan.num_parameters
    # Gradients, masters and two moments are float32.
    assert actor.gradients == 4 * plan.num_parameters
    assert actor.optimizer == 3 * 4 * plan.num_parameters
    assert (reference.gradients, reference.optimizer, reference.cache) == (0, 0, 0)
    # Keys and values (2) of 2 bytes, in 2 layers, of 2 heads of 16: 256 bytes a token. Each of 2 ranks has 4 prompts,
    # which stay, and decodes 8 rows = 2 groups together: a block of 32 tokens for each prompt and each response.
    assert rollout.cache == 256 * 32 * (4 + 8)
    # Many prompts to validate on fill all the blocks that there are.
    validated = make_plan(load("model.dtype=bfloat16", "rollout.max_batch_rows=8")).memory
    assert next(m for m in validated if m.role == "rollout").cache == 256 * 8 * (16 + 2 * 32)
    # A GPU reserves blocks for 8 rows of 16 tokens that begin two blocks each.
    gpu = ("cluster.device=cuda", "model.dtype=float32")
    on_gpu = {m.role: m for m in make_plan(load(*gpu, "rollout.max_batch_rows=8")).memory}
    assert on_gpu["rollout"].cache == 2 * 256 * 8 * (16 + 2 * 32)
    assert rollout.total == rollout.cache + rollout.activations
    assert actor.held == actor.weights + actor.gradients + actor.optimizer
    assert actor.total == actor.held + actor.activations


def test_activations_by_hand(here: Path):
    shape = ModelShape(
        hidden_size=10,
        vocab_size=7,
        tie_embeddings=False,
        layers=(Layers(2, Attention(10, num_heads=2, num_key_value_heads=1, head_dim=5), MLP(10, 20)),),
    )
    # Numbers of 4 bytes: norms 2 x (2 x 10 + 1), what attention returns 2 x 5, MLP 4 x 20.
    assert shape.kept_bytes(4) == 4 * (42 + 10 + 80)
    # In bfloat16 one number of each norm is still float32.
    assert shape.kept_bytes(2) == 2 * (40 + 10 + 80) + 2 * 4
    # Queries 2 x 5, keys and values 2 x 5, 2 heads x 6 scores.
    assert shape.attended_bytes(4, num_scores=6) == 4 * (10 + 10 + 12)
    # The residual stream and its norm 2 x 10, cosines and sines 2 x 5; gate, up, silu and product 4 x 20.
    assert shape.live_bytes(4) == 4 * (20 + 10 + 4 * 20)
    # The same without an MLP, and queries, keys and values 20.
    assert shape.attending_bytes(4) == 4 * (20 + 10 + 20)
    # These again, where rows lie, what comes out 10, shares of 2 heads x 6 tokens, scores of a block x 4, and what
    # comes out of it, half of a row.
    assert shape.folded_bytes(4, num_scores=6, num_block_scores=4) == 4 * (20 + 10 + 2 * (6 + 4))


def test_what_rows_of_a_group_share_is_computed_once(here: Path):
    common = ("recipe=grpo", "cluster={device: cuda, pools: {main: [1]}}", "actor.num_mini_batches=1")
    common += ("data.max_prompt_tokens=48", "engine.max_tokens_per_micro_batch=448")
    groups = make_plan(load(*common, "rollout={num_prompts: 2, group_size: 8, max_response_tokens: 8}"))
    pairs = make_plan(load(*common, "rollout={num_prompts: 8, group_size: 2, max_response_tokens: 8}"))
    # Either way 8 of 16 rows of 56 tokens make a micro-batch: 1 or 4 prompts of 48 tokens, and 8 responses of 8.
    assert (48 + 64) / (4 * 48 + 64) < groups.memory[0].activations / pairs.memory[0].activations < 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_keeps_for_the_backward_pass_what_the_plan_says(here: Path, architecture: str, dtype: str):
    lengths = [16] * 19 + [15]

    def kept(num_layers: int) -> int:
        overrides = f"architecture: {architecture}, num_layers: {num_layers}, num_heads: 4, num_key_value_heads: 2"
        made = load(f"model.create={{{overrides}, hidden_size: 64, intermediate_size: 96}}").model.create
        folder = here / f"model{num_layers}"
        make_model(folder, made)
        model = load_policy(str(folder), dtype=dtype).model
        return bytes_kept_by_a_forward_pass(model, lengths)

    per_token = (kept(3) - kept(1)) / 2 / sum(lengths)
    shape, size = read_shape(here / "model1"), {"float32": 4, "bfloat16": 2}[dtype]
    assert per_token == pytest.approx(shape.kept_bytes(size) + shape.attended_bytes(size, 16), rel=0.02)


def bytes_kept_by_a_forward_pass(model, lengths: list[int]) -> int:
    """Of all storages that autograd holds on to, without the weights."""
    offsets = offsets_from_lengths(torch.tensor(lengths))
    rows = PackedRows(offsets, torch.device("cpu"))
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tokens = torch.zeros(1, int(offsets[-1]), dtype=torch.int64)
        out = model.base_model(input_ids=tokens, position_ids=rows.position_ids, use_cache=False, rows=rows)
    assert out.last_hidden_state.requires_grad
    return sum(storage.nbytes() for at, storage in storages.items() if at not in weights)


def test_roles_of_a_process_hold_their_weights_together_and_take_turns_with_the_rest(here: Path):
    plan = make_plan(load())
    turns = [memory.total - memory.held for memory in plan.memory]
    assert plan.process_memory("main") == sum(memory.held for memory in plan.memory) + max(turns)
    assert plan.process_memory("elsewhere") == 0


def test_roles_that_sleep_hold_nothing_while_others_have_their_turn(here: Path):
    awake = make_plan(load("cluster.device=cuda"))
    asleep = make_plan(load("cluster.device=cuda", "engine.sleep=true"))
    actor, rollout, reference, critic = asleep.memory
    assert asleep.awake_memory("actor") == actor.total == awake.memory[0].total
    learners = (actor.weights + actor.optimizer, critic.weights + critic.optimizer)
    assert asleep.cpu_memory("main") == sum(learners) + reference.weights, "gradients are gone"
    # Rollouts are sampled from the actor's weights, which wake for them alone.
    assert asleep.awake_memory("rollout") == rollout.total + actor.weights
    assert asleep.awake_memory("reference") == reference.total
    most = max(actor.total, critic.total, rollout.total + actor.weights)
    assert asleep.process_memory("main") == most < awake.process_memory("main")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_checkpoints_of_layers_keep_their_inputs_and_offloaded_ones_hardly_those(here: Path, device: str):
    sizes = "model.create={hidden_size: 128, num_layers: 16, intermediate_size: 512, num_heads: 4}"
    common = (
        sizes,
        f"cluster.device={device}",
        "model.dtype=float32",
        "engine.max_tokens_per_micro_batch=4096",
        "rollout.num_prompts=256",
    )
    plans = [make_plan(load(*common, f"engine.activations={what}")) for what in ("keep", "checkpoint")]
    kept, checkpointed = (plan.memory[0].activations for plan in plans)
    assert checkpointed < 0.3 * kept
    if device == "cuda":
        offloaded = make_plan(load(*common, "engine.activations=offload")).memory[0].activations
        # Fourteen of sixteen inputs are elsewhere: 4 bytes x 128 numbers for each of a rank's 128 rows x 7 tokens of a
        # response, without its last, and of the 32 prompts of 8 tokens that they have.
        assert checkpointed - offloaded == 14 * 4 * 128 * (128 * 7 + 32 * 8)


def test_an_offloaded_optimizer_is_on_the_device_in_parts_when_activations_are_gone(here: Path):
    keys = ("model.create=null", "model.path=Qwen/Qwen3-0.6B", "cluster.device=cuda", "model.dtype=bfloat16")
    kept, offloaded = (make_plan(load(*keys, *more)).memory[0] for more in ((), ("engine.offload=optimizer",)))
    assert kept.optimizer == 3 * 4 * 596_049_920
    assert offloaded.optimizer == 0
    assert offloaded.activations == max(kept.activations, 3 * 4 * 151_936 * 1024), "the embedding is the largest part"
    few = ("engine.max_tokens_per_micro_batch=64", "cluster.pools={main: [1]}")
    assert make_plan(load(*keys, "engine.offload=optimizer", *few)).memory[0].activations == 3 * 4 * 151_936 * 1024


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "row", "num_scores", "num_block_scores"),
    [("float32", 16, 16, 16), ("float32", 128, 96, 64), ("bfloat16", 128, 96, 64)],
)
def test_a_pass_without_gradients_has_at_its_peak_what_the_plan_says(
    here: Path, architecture: str, dtype: str, row: int, num_scores: int, num_block_scores: int
):
    made = f"architecture: {architecture}, hidden_size: 64, num_layers: 1, num_heads: 4, num_key_value_heads: 2"
    made = load(f"model.create={{{made}, intermediate_size: 96}}").model.create
    make_model(here / "model", made)
    model = load_policy(str(here / "model"), dtype=dtype).model
    offsets = offsets_from_lengths(torch.tensor([row] * (4096 // row)))
    rows = PackedRows(offsets, torch.device("cpu"))
    tokens = torch.zeros(1, int(offsets[-1]), dtype=torch.int64)
    with torch.no_grad(), LiveBytes() as live:
        model.base_model(input_ids=tokens, position_ids=rows.position_ids, use_cache=False, rows=rows)
    shape, size = read_shape(here / "model"), {"float32": 4, "bfloat16": 2}[dtype]
    per_token = shape.attending_bytes(size) + shape.folded_bytes(size, num_scores, num_block_scores)
    assert live.most / int(offsets[-1]) == pytest.approx(max(per_token, shape.live_bytes(size)), rel=0.06)


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations have made and nobody has let go."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, pytree.tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.held:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
        self.most = max(self.most, sum(self.held.values()))
        return out


def test_prompts_to_validate_on_are_computed_together_too(here: Path):
    few, many = (
        make_plan(load("recipe=grpo", f"validation.max_prompts={number}", "rollout.max_batch_rows=256")).memory[1]
        for number in (1, 400)
    )
    assert few.role == many.role == "rollout"
    # 200 prompts on each rank, instead of 4 of a step: they need room in a pass, whatever is drawn afterwards.
    assert few.activations < many.activations


def test_several_ranks_need_room_for_a_flat_copy_of_the_gradients(here: Path):
    sizes = "model.create={hidden_size: 1024, num_layers: 2, num_heads: 16, num_key_value_heads: 16}"
    small = (sizes, "rollout={num_prompts: 2, group_size: 1}", "actor.num_mini_batches=1", "critic.num_mini_batches=1")
    actor = make_plan(load(*small)).memory[0]
    assert (actor.num_ranks, actor.activations) == (2, actor.gradients)
    alone = make_plan(load(*small, "cluster.pools.main=[1]")).memory[0]
    assert alone.activations < alone.gradients


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_cost_of_attention_is_that_of_the_counted_operations(here: Path, architecture: str):
    config = load(f"model.create={{architecture: {architecture}, num_heads: 4, num_key_value_heads: 2}}")
    make_model(here / "model", config.model.create)
    counted = flops_of(load_policy(str(here / "model"), dtype="float32").model).attention_cost
    assert attention_cost(config) == pytest.approx(counted)
    assert attention_cost(load("model.create=null", "model.path=Some/Model")) == 0


def test_a_rollout_role_on_a_pool_of_its_own_has_weights(here: Path):
    plan = make_plan(load("cluster.pools.second=[1]", "rollout.placement.pool=second"))
    rollout = next(memory for memory in plan.memory if memory.role == "rollout")
    assert (rollout.pool, rollout.num_ranks, rollout.weights) == ("second", 1, 4 * plan.num_parameters)


def test_the_compiled_decoder_is_counted_where_a_process_samples_and_nowhere_else(here: Path):
    beside, apart = (
        {memory.role: memory.activations for memory in make_plan(load(*pools)).memory}
        for pools in ((), ("cluster.pools.second=[2]", "rollout.placement={pool: second, num_ranks: 2}"))
    )
    decoder = 15 * 2**20
    assert {role: beside[role] - apart[role] for role in beside} == {
        role: 0 if role == "rollout" else decoder for role in beside
    }


def test_nothing_is_known_of_a_model_on_the_hub(here: Path):
    plan = make_plan(load("model.create=null", "model.path=Some/Model"))
    assert plan.num_parameters is None
    assert plan.memory == ()
    assert plan.num_rows == 32
