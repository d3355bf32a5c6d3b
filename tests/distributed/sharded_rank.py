"""One rank of `test_sharding.py`: takes three steps of every case that has a place for it and writes what it got."""

import json
import os
import signal
from pathlib import Path

import safetensors.torch
import torch
from ranks import CONFIG, DTYPES, EPS, loss_and_norm, loss_from, make_actor_batch, open_meeting
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
)

from rallypoint.cluster import Mesh
from rallypoint.engine import TrainingEngine, critic_values, optimizer_tensors, policy_outputs, restore_optimizer
from rallypoint.errors import ModelError, NotFiniteError, PeerFailedError, RowTooLongError
from rallypoint.families import FAMILIES
from rallypoint.model_files import load_policy, save_model, save_tensors
from rallypoint.models import ATTENTION, ModelShard
from rallypoint.models.norm import replace_norms
from rallypoint.models.shard import shard_model, shard_parts
from rallypoint.models.tensor_parallel import cut_model
from rallypoint.parallel import DeviceMesh

TWO, THREE = [[0, 1, 2, 3, 4], [5, 6, 7]], [[3], [0, 1, 2, 4], [5, 6, 7]]
CASES = {
    "shard2": ({"dp_shard": 2}, TWO),
    "shard3": ({"dp_shard": 3}, THREE),
    "shard3, one without rows": ({"dp_shard": 3}, [[0, 1, 2, 3], [], [4, 5, 6, 7]]),
    "shard3, one with nothing to train": ({"dp_shard": 3}, [[1], [0, 2, 3, 4], [5, 6, 7]]),
    "shard2 x replicate2": ({"dp_replicate": 2, "dp_shard": 2}, [[0, 1], [2], [], [3, 4, 5, 6, 7]]),
    "shard2 x sp2": ({"dp_shard": 2, "sp": 2}, TWO),
    "shard2 x tp2": ({"dp_shard": 2, "tp": 2}, TWO),
}
TRIED = {
    ("policy", "float64"): tuple(CASES),
    ("policy", "float32"): ("shard3", "shard2 x replicate2", "shard2 x tp2"),
    ("policy", "bfloat16"): ("shard3", "shard2 x tp2"),
    ("tied policy", "float64"): ("shard3", "shard2 x tp2"),
    ("critic", "float64"): ("shard3, one without rows", "shard2 x sp2"),
}
KINDS = {
    "policy": (LlamaForCausalLM, False),
    "tied policy": (LlamaForCausalLM, True),
    "critic": (LlamaForTokenClassification, False),
}


def make_model(kind, dtype):
    model_type, tied = KINDS[kind]
    config = LlamaConfig(
        vocab_size=21,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=20,
        initializer_range=0.3,
        num_labels=1,
        tie_word_embeddings=tied,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(0)
    model = model_type(config).eval().to(dtype)
    replace_norms(model)  # transformers' own round to float32, also what several rows share
    return model


def outputs_of(shard):
    if isinstance(shard.model, LlamaForTokenClassification):
        return lambda part, at: critic_values(shard, part, at)
    return lambda part, at: policy_outputs(shard, part, at, 0.7).logprobs


def loss_of(shard):
    return loss_from(outputs_of(shard))


def make_engine(kind, dtype, mesh, cap):
    """An engine, and which rectangle of every weight it has."""
    model = make_model(kind, dtype)
    tensor = cut_model(model, FAMILIES["llama"], mesh.tp)
    sharding = shard_model(model, mesh, tensor)
    parts = shard_parts(tensor.parts, mesh.shard)
    engine = TrainingEngine(
        ModelShard(model, parts, mesh, sharding), optimizer=CONFIG, eps=EPS, max_tokens_per_micro_batch=cap
    )
    return engine, parts


def outcome(kind, dtype, mesh, batch, rows, cap):
    """Three steps, then an evaluation: this rank's numbers and weights."""
    engine, parts = make_engine(kind, dtype, mesh, cap)
    part = batch.rows(rows)
    losses, norms = [], []
    for step in (1, 2, 3):
        metrics = engine.train(part, loss_of(engine.shard), denominator=batch.num_loss_tokens, step=step, num_steps=3)
        loss, norm = loss_and_norm(metrics)
        # The ranks along sp and tp have each counted the loss of all of them.
        losses.append(loss / mesh.sp.size / mesh.tp.size)
        norms.append(norm)
        engine.sleep()
        assert not any(weight.untyped_storage().nbytes() for weight in engine.weights.values())
        engine.wake()
    tensors = {name: weight.detach() for name, weight in engine.weights.items()}
    tensors |= {f"start of {name}": torch.tensor(where.starts) for name, where in parts.items()}
    values = engine.evaluate(part, outputs_of(engine.shard)).values[part.loss_mask]
    numbers = {"losses": losses, "norms": norms}
    return tensors | {name: torch.tensor(n, dtype=torch.float64) for name, n in numbers.items()} | {"outputs": values}


def load_and_save(mesh, model_folder, batch, rows, into, dtype="float64"):
    """Two steps of a model whose parts are read from a file; the whole of it is written again, with its masters."""
    shard = load_policy(model_folder, dtype=dtype, mesh=mesh)
    engine = TrainingEngine(shard, optimizer=CONFIG, eps=EPS, max_tokens_per_micro_batch=40)
    part = batch.rows(rows)
    for step in (1, 2):
        loss = loss_of(engine.shard)
        engine.train(part, loss, denominator=batch.num_loss_tokens, step=step, num_steps=2)
    save_model(shard, into)
    assert engine.optimizer is not None
    state = optimizer_tensors(engine.weights, engine.optimizer)
    masters = {name.removesuffix("/master"): tensor for name, tensor in state.items() if name.endswith("/master")}
    save_tensors(into / "masters", masters, {name: shard.parts[name] for name in masters}, mesh)
    restore_optimizer(engine.weights, engine.optimizer, state)


def refusals(mesh, model_folder, folder):
    """What each of two ranks says of models that none of them can use: no family of ours, and one weight a NaN."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    foreign, broken = (folder / f"{kind} for {mesh.rank}" for kind in ("foreign", "broken"))
    CohereForCausalLM(CohereConfig(**sizes, intermediate_size=32, pad_token_id=0)).save_pretrained(foreign)
    policy = AutoModelForCausalLM.from_pretrained(model_folder)
    policy.get_parameter("model.layers.1.mlp.up_proj.weight").data[-1, -1] = float("nan")
    policy.save_pretrained(broken)
    said = []
    for path in (foreign, broken):
        try:
            load_policy(str(path), dtype="float32", mesh=mesh)
            said.append("nothing")
        except ModelError as error:
            said.append(str(error).removeprefix(f"{path}: "))
    return said


def fail_in_turn(mesh, batch, rows):
    """What each rank says of a row that is too long for one of them, and of a loss that is NaN on one of them."""
    said = []
    engine, _ = make_engine("policy", torch.float32, mesh, 39)
    try:
        engine.train(batch.rows(rows), loss_of(engine.shard), denominator=1, step=1, num_steps=1)
    except (RowTooLongError, PeerFailedError) as error:
        said.append(type(error).__name__)
    engine, _ = make_engine("policy", torch.float32, mesh, 40)

    def loss(part, at):
        total, metrics = loss_of(engine.shard)(part, at)
        return total * (float("nan") if mesh.rank == 1 else 1.0), metrics

    try:
        engine.train(batch.rows(rows), loss, denominator=1, step=1, num_steps=1)
    except (NotFiniteError, PeerFailedError) as error:
        said.append(type(error).__name__)
    return said


def fail_in_a_pass(mesh, batch, rows, fail):
    """What each rank notices when the last one fails between forward and backward of an update, or in an evaluation."""
    engine, _ = make_engine("policy", torch.float32, mesh, 45)
    before = {name: weight.detach().clone() for name, weight in engine.weights.items()}

    def outputs(part, at):
        if mesh.rank == 2:
            fail()
        return outputs_of(engine.shard)(part, at)

    noticed = "nothing"
    try:
        if fail is raise_in_an_evaluation:
            engine.evaluate(batch.rows(rows), outputs)
        engine.train(batch.rows(rows), loss_from(outputs), denominator=1, step=1, num_steps=1)
    except (RuntimeError, ZeroDivisionError) as error:
        noticed = f"{type(error).__name__}: {error}"
    same = all(torch.equal(weight, before[name]) for name, weight in engine.weights.items())
    return {"noticed": noticed, "weights are untouched": same}


def raise_midway():
    raise ZeroDivisionError("this is the cause")


def raise_in_an_evaluation():
    raise ZeroDivisionError("this is the cause")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def main(model_folder: str, folder: Path, rank: int) -> None:
    batch = make_actor_batch()
    rendezvous = open_meeting(folder)
    for (kind, dtype), names in TRIED.items():
        for name in ("alone", *names):
            sizes, shards = CASES.get(name, ({}, [list(range(len(batch)))]))
            grid = Mesh({"dp_replicate": 1, "dp_shard": 1, "sp": 1, "tp": 1, **sizes})
            if rank >= grid.size:
                continue
            case = f"{kind}, {name}, {dtype}"
            mesh = DeviceMesh.connect(rendezvous, case, rank, sizes, timeout_s=120)
            rows, cap = shards[grid.part(rank)], 1000 if name == "alone" else 45
            tensors = outcome(kind, DTYPES[dtype], mesh, batch, rows, cap)
            safetensors.torch.save_file(tensors, folder / f"{case}, {rank}.safetensors")
    if rank < 2:
        mesh = DeviceMesh.connect(rendezvous, "refusals", rank, {"dp_shard": 2}, timeout_s=60)
        (folder / f"refusals of {rank}.json").write_text(json.dumps(refusals(mesh, model_folder, folder)))
    if rank < 3:
        mesh = DeviceMesh.connect(rendezvous, "files", rank, {"dp_shard": 3}, timeout_s=120)
        load_and_save(mesh, model_folder, batch, THREE[rank], folder / "of three")
        load_and_save(mesh, model_folder, batch, THREE[rank], folder / "in half precision", "bfloat16")
        if rank == 0:
            load_and_save(DeviceMesh.solo(), model_folder, batch, list(range(len(batch))), folder / "of one")
        mesh = DeviceMesh.connect(rendezvous, "failures", rank, {"dp_shard": 3}, timeout_s=60)
        (folder / f"failures seen by {rank}.json").write_text(json.dumps(fail_in_turn(mesh, batch, THREE[rank])))
        for name, fail in FAILURES.items():
            # Nobody may wait for this deadline.
            mesh = DeviceMesh.connect(rendezvous, name, rank, {"dp_shard": 3}, timeout_s=3600)
            seen = fail_in_a_pass(mesh, batch, THREE[rank], fail)
            (folder / f"{name} seen by {rank}.json").write_text(json.dumps(seen))


FAILURES = {"error in an update": raise_midway, "error in an evaluation": raise_in_an_evaluation, "death": die}
"""The last one leaves nobody to go on with."""
