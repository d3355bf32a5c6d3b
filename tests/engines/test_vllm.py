"""A real server: the tokens of the plain engine, weights that enter it, a kill in the middle, a run that learns."""

import contextlib
import copy
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_file import read_metrics
from outsider import Caller
from sampling_cases import CHANGES, decode
from tiny_models import make_tiny_model

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.config import LoRAConfig
from rallypoint.errors import NotFiniteError, PublishError, WeightsMismatchError
from rallypoint.generation import HFEngine, NativeEngine, Request, SamplingParams, generate, stream
from rallypoint.generation.vllm import Launch, Outline, ServerProcess, VllmConnection, VLLMEngine
from rallypoint.generation.vllm.server import shared_files
from rallypoint.journal import RoleLost, RolesRestarted, StepDone, read_journal
from rallypoint.model_files import load_policy, outline_policy
from rallypoint.models import ModelShard, trained_weights
from rallypoint.roles.connections import ServerReplica
from rallypoint.roles.publishing import Stream, make_plan
from rallypoint.transport_kinds import TRANSPORT_KINDS
from rallypoint.types import Prompts, offsets_from_lengths
from rallypoint.weights import Held, Sender, join, same_node, share_trained
from rallypoint.weights.published_folder import write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BASE = SamplingParams(max_new_tokens=12, seed=3, stop_tokens=(0, 5, 11))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, hidden_size=64, num_heads=2, num_key_value_heads=1, intermediate_size=128, max_positions=256)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_policy(str(folder), dtype="float32").model


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    offsets = offsets_from_lengths(torch.tensor([3, 9, 1, 17]))
    tokens = torch.randint(1, 20, (int(offsets[-1]),), generator=torch.Generator().manual_seed(0))
    return Prompts(offsets=offsets, tokens=tokens, prompt_index=torch.arange(4) + 7)


@pytest.fixture(scope="module")
def servers() -> list[ServerProcess]:
    return []


@pytest.fixture(scope="module")
def start(installed, folder, servers, tmp_path_factory):
    """Return a function that starts an engine: for adapters of a rank or whole weights, over some devices."""
    outline = Outline.of(outline_policy(str(folder), dtype="float32"))
    launch = Launch(
        python=installed.python, model=str(folder), dtype="float32", device="cpu", num_cpus=1, max_tokens=256,
        max_rows=64, cache_bytes=64 * 512 * outline.cache_bytes_per_token, trust_remote_code=False,
        log=tmp_path_factory.mktemp("logs") / "vllm.log",
    )  # fmt: skip

    @contextlib.contextmanager
    def start_one(adapter_rank: int | None, **changes: Any) -> Iterator[VLLMEngine]:
        def start_server(own: Path) -> ServerProcess:
            servers.append(ServerProcess(dataclasses.replace(launch, adapter_rank=adapter_rank, **changes), own))
            return servers[-1]

        connection = VllmConnection(start_server, version=4, takes_adapters=adapter_rank is not None)
        with contextlib.closing(connection):
            yield VLLMEngine(connection, outline, max_request_tokens=256, max_rows=64, decode=decode)

    return start_one


@pytest.fixture(scope="module")
def engine(start):
    with start(None) as made:
        yield made


def load(engine, version, model, into) -> Path:
    """Publish the weights of a model as a folder, and have the server load them."""
    written = write(ModelShard.whole(model), into, version, base=str(into))
    engine.load_folder(version, written)
    return written


@pytest.fixture
def back(engine, model, tmp_path):
    """Whatever a test loads, the next one finds the model's own weights."""
    yield
    load(engine, 4, model, tmp_path)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_tokens_and_logprobs_are_those_of_transformers(engine, model, prompts, changes):
    params = dataclasses.replace(BASE, **changes)
    expected = generate(HFEngine(model, decode=decode, version=4), prompts, params, version=4, group_size=2)
    batch = generate(engine, prompts, params, version=4, group_size=2)
    assert batch.tokens.tolist() == expected.tokens.tolist()
    assert batch.truncated.tolist() == expected.truncated.tolist()
    torch.testing.assert_close(batch.rollout_logprobs, expected.rollout_logprobs, rtol=1e-4, atol=1e-4)
    if expected.sampled_logprobs is not None:
        torch.testing.assert_close(batch.sampled_logprobs, expected.sampled_logprobs, rtol=1e-4, atol=1e-4)


def test_a_stream_is_the_rollout_token_by_token(engine, prompts):
    tokens = tuple(prompts.tokens[:3].tolist())
    outputs = list(stream(engine, Request(tokens=tokens, params=BASE, prompt_index=7, streamed=True)))
    batch = generate(engine, prompts, BASE, version=4, group_size=2)
    assert [token for output in outputs for token in output.tokens] == batch.response(0).tolist()
    assert len(outputs) == len(batch.response(0))


@pytest.mark.usefixtures("back")
def test_weights_enter_a_running_server_and_damaged_ones_do_not(engine, model, prompts, tmp_path):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.8)
    for version in (5, 6):
        written = load(engine, version, other, tmp_path / "published")
        batch = generate(engine, prompts, BASE, version=version, group_size=2)
        assert batch.versions.tolist() == [version] * len(batch)
        expected = generate(HFEngine(other, version=version), prompts, BASE, version=version, group_size=2)
        assert batch.tokens.tolist() == expected.tokens.tolist()
    damaged = tmp_path / "version_000006" / "model.safetensors"
    shutil.copytree(written, damaged.parent)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(WeightsMismatchError, match=r"version 6 was not loaded by vllm: .*differs from its manifest"):
        engine.load_folder(6, damaged.parent)


@pytest.mark.usefixtures("back")
def test_logits_that_are_not_finite_fail_their_request_and_no_other(engine, model, tmp_path):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_input_embeddings().weight[19] = float("nan")
    load(engine, 5, broken, tmp_path)
    good, bad = (Request(tokens=tokens, params=BASE, prompt_index=8) for tokens in ((3, 4), (3, 19)))
    with pytest.raises(NotFiniteError, match="token 0 of the response of prompt 8 sample 0"):
        list(stream(engine, bad))
    assert list(stream(engine, good))[-1].finish_reason in ("stop", "length")


INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
from triton.backends import backends
class Driver:
    is_active = staticmethod(lambda: True)
class Backend:
    driver, compiler = Driver, None
backends.setdefault("cpu", Backend)
"""
"""What Python runs at its start, so that Triton runs kernels on a CPU, slowly, and vLLM takes it for able to."""


@pytest.fixture
def interpreting(installed, tmp_path) -> Path:
    """An interpreter of vLLM's environment whose Triton computes on a CPU."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(INTERPRETED)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/start:$PYTHONPATH exec {installed.python} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("adapter_rank", [None, 3], ids=["all weights", "adapters"])
def test_the_second_model_runner_samples_the_same_tokens_while_it_schedules_ahead(
    start, servers, interpreting, folder, model, prompts, adapter_rank, tmp_path
):
    with start(adapter_rank, python=interpreting, second_runner=True) as engine:
        for name in ("plain", "greedy of a warm policy", "penalty", "stop strings", "all"):
            params = dataclasses.replace(BASE, **CHANGES[name])
            expected = generate(HFEngine(model, decode=decode, version=4), prompts, params, version=4, group_size=2)
            batch = generate(engine, prompts, params, version=4, group_size=2)
            assert batch.tokens.tolist() == expected.tokens.tolist(), name
            torch.testing.assert_close(batch.rollout_logprobs, expected.rollout_logprobs, rtol=1e-4, atol=1e-4)
        lora = adapter_rank and LoRAConfig(rank=adapter_rank, alpha=12.0, target_modules=("q_proj", "down_proj"))
        shard = load_policy(str(folder), dtype="float32", lora=lora)
        with torch.no_grad():
            for weight in trained_weights(shard.model).values():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
        engine.load_folder(5, write(shard, tmp_path, 5, base=str(folder)))
        expected = generate(HFEngine(shard.model, version=5), prompts, BASE, version=5, group_size=2)
        assert generate(engine, prompts, BASE, version=5, group_size=2).tokens.tolist() == expected.tokens.tolist()
    said = servers[-1]._log.read_text()
    assert "Using V2 Model Runner" in said
    assert "'async_scheduling': True" in said  # vLLM does not start where it cannot do what it was told


def test_the_second_model_runner_says_which_experts_it_chose(interpreting, prompts, tmp_path):
    """The same as our own engine; of prompts that were read before, too, whose keys and values are still there."""
    folder = make_tiny_model(
        tmp_path / "model", architecture="qwen3_moe", hidden_size=64, num_heads=2, num_layers=3, intermediate_size=128,
        max_positions=256,
    )  # fmt: skip
    shard = load_policy(folder, dtype="float32")
    outline = Outline.of(outline_policy(folder, dtype="float32"))
    launch = Launch(
        python=interpreting, model=folder, dtype="float32", device="cpu", num_cpus=1, max_tokens=256, max_rows=64,
        cache_bytes=64 * 512 * outline.cache_bytes_per_token, trust_remote_code=False, log=tmp_path / "vllm.log",
        second_runner=True, records_experts=True,
    )  # fmt: skip
    own = NativeEngine(shard.model, max_rows=8, cache_tokens=2048, records_experts=True, version=4)
    with contextlib.closing(VllmConnection(lambda place: ServerProcess(launch, place), version=4)) as connection:
        engine = VLLMEngine(connection, outline, max_request_tokens=256, max_rows=64)
        for seed in (3, 4):
            params = dataclasses.replace(BASE, seed=seed)
            expected = generate(own, prompts, params, version=4, group_size=2)
            batch = generate(engine, prompts, params, version=4, group_size=2)
            assert batch.tokens.tolist() == expected.tokens.tolist()
            assert batch.experts is not None
            assert expected.experts is not None
            chosen = [experts.view(-1, 3, 2).sort(-1).values.tolist() for experts in (batch.experts, expected.experts)]
            assert chosen[0] == chosen[1]


def test_a_server_over_two_devices_samples_the_tokens_of_one(start, servers, model, prompts, tmp_path):
    """With the initial weights, with new ones, and after it was killed."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.8)
    with start(None, num_devices=2) as engine:
        for version, whole in ((4, model), (5, other), (5, other)):
            if engine.version != version:
                load(engine, version, whole, tmp_path)
            batch = generate(engine, prompts, BASE, version=version, group_size=2)
            expected = generate(
                HFEngine(whole, decode=decode, version=version), prompts, BASE, version=version, group_size=2
            )
            assert batch.tokens.tolist() == expected.tokens.tolist()
            torch.testing.assert_close(batch.rollout_logprobs, expected.rollout_logprobs, rtol=1e-4, atol=1e-4)
            if version == 5:
                os.killpg(servers[-1].pid, signal.SIGKILL)


class Trainer:
    """What a rollout rank with a server finds in its process, and, if `apart`, the actor's rank of another one."""

    rank, device, say, tick, is_open = 0, "cpu", staticmethod(print), staticmethod(lambda: None), True

    def __init__(self, folder, rendezvous, *, apart):
        self.apart, self.other = apart, ThreadPoolExecutor(1)
        self.shard, self.rendezvous = load_policy(str(folder), dtype="float32"), rendezvous
        self.memory = share_trained(self.shard.model)
        self.held = {name: Held(tensor.dtype, self.shard.parts[name]) for name, tensor in self.shard.trained().items()}

    def open(self, stream, plan, place, exposed):
        self.transport = join(stream.kind, self.rendezvous, plan, place, device="cpu", exposed=exposed)

    def connect(self, replica, stream):
        process = object()
        plan = make_plan(stream, [self.held], [object() if self.apart else process], [process])
        if self.apart:
            joining = self.other.submit(join, stream.kind, self.rendezvous, plan, 0, device="cpu")
        replica.connect(stream, plan)
        self.line = joining.result() if self.apart else None

    def publish(self, replica, version):
        if self.line is not None:
            sending = self.other.submit(self.line.run, version, Sender(self.shard.trained()), None, self.tick)
        digest = replica.receive(version)
        if self.line is not None:
            sending.result()
        return digest

    def close(self):
        """Nothing is open."""

    def meet(self, plan, place, given_up):
        return same_node.meet_members(self.rendezvous, plan, place, given_up=given_up)

    def exposed(self):
        return self.memory.exposed(self.held, self.shard.trained())

    @contextlib.contextmanager
    def open_sender(self):
        yield Sender(self.shard.trained())


@pytest.mark.parametrize(
    ("way", "num_devices", "apart"),
    [("memory", 1, False), ("memory", 2, False), ("broadcast", 1, False), ("broadcast", 2, True)],
)
def test_weights_that_are_sent_arrive_as_from_a_folder_and_a_server_that_lost_them_takes_the_folder(
    start, servers, folder, prompts, tmp_path, way, num_devices, apart
):
    with start(None, num_devices=num_devices) as engine, open_rendezvous("memory", "vllm") as rendezvous:
        trainer = Trainer(folder, rendezvous, apart=apart)
        replica = ServerReplica(trainer, trainer, engine, trainer)
        trainer.connect(replica, Stream(TRANSPORT_KINDS[way], "xxh3", 600.0, num_workers=num_devices))
        for version in (5, 6, 7):
            with torch.no_grad():
                for weight in trainer.shard.model.parameters():
                    weight.mul_(0.9)
            if version < 7:
                assert trainer.publish(replica, version)
            else:
                os.killpg(servers[-1].pid, signal.SIGKILL)
                number = engine.submit(Request(tokens=(3, 4), params=BASE))
                while not engine.lacks_weights:
                    assert engine.step() == []
                engine.cancel(number)
                assert [output.finish_reason for output in engine.step()] == ["cancelled"]
                with pytest.raises(PublishError, match="started again since it connected"):
                    engine.receive(7)
                replica.read(version, write(trainer.shard, tmp_path, version, base=str(folder)))
            batch = generate(engine, prompts, BASE, version=version, group_size=2)
            expected = generate(
                HFEngine(trainer.shard.model, decode=decode, version=version), prompts, BASE, version=version,
                group_size=2,
            )  # fmt: skip
            assert batch.versions.tolist() == [version] * len(batch)
            assert batch.tokens.tolist() == expected.tokens.tolist()
            torch.testing.assert_close(batch.rollout_logprobs, expected.rollout_logprobs, rtol=1e-4, atol=1e-4)


def test_a_server_that_is_killed_half_way_is_started_again_and_every_rollout_is_the_same(engine, prompts):
    params = dataclasses.replace(BASE, stop_tokens=(), max_new_tokens=200)
    requests = [
        Request(tokens=tuple(prompts.rows([row]).tokens.tolist()), params=params, prompt_index=row, sample_index=sample)
        for row in range(len(prompts))
        for sample in range(8)
    ]
    supervisor, shared = engine._connection.supervisor, dict[Path, int]()

    def sampled(*, kills: bool) -> list[list[int]]:
        numbers, tokens, num_steps = [engine.submit(request) for request in requests], dict[int, list[int]](), 0
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.tokens)
            num_steps += 1
            if kills and num_steps == 2:  # requests are under way
                shared.update(shared_files(supervisor._server.pid))
                os.killpg(supervisor._server.pid, signal.SIGKILL)
        return [tokens[number] for number in numbers]

    expected, before = sampled(kills=False), supervisor.num_servers
    assert sampled(kills=True) == expected
    assert supervisor.num_servers == before + 1
    assert shared
    assert not any(path.exists() for path in shared), "what the killed one had in memory with a name is gone"


def test_adapters_enter_a_running_server_by_themselves(start, servers, folder, prompts, tmp_path):
    """Two versions, each on three linear layers; the second one also in a server that was killed."""
    lora = LoRAConfig(rank=3, alpha=12.0, target_modules=("q_proj", "v_proj", "down_proj"))
    params = dataclasses.replace(BASE, stop_tokens=(), max_new_tokens=40)
    with start(3) as engine:
        before = generate(engine, prompts, params, version=4, group_size=2).tokens.tolist()
        for version in (5, 6):
            shard = load_policy(str(folder), dtype="float32", lora=lora)
            with torch.no_grad():
                generator = torch.Generator().manual_seed(version)
                for weight in trained_weights(shard.model).values():
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
            expected = generate(HFEngine(shard.model, version=version), prompts, params, version=version, group_size=2)
            engine.load_folder(version, write(shard, tmp_path, version, base=str(folder)))
            batch = generate(engine, prompts, params, version=version, group_size=2)
            assert batch.versions.tolist() == [version] * len(batch)
            assert batch.tokens.tolist() == expected.tokens.tolist() != before
            torch.testing.assert_close(batch.rollout_logprobs, expected.rollout_logprobs, rtol=1e-4, atol=1e-4)
            before = batch.tokens.tolist()
        os.killpg(servers[-1].pid, signal.SIGKILL)
        assert generate(engine, prompts, params, version=6, group_size=2).tokens.tolist() == before
        damaged = tmp_path / "version_000006" / "adapter_model.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
        with pytest.raises(WeightsMismatchError, match="differs from its manifest"):
            engine.load_folder(6, damaged.parent)


ONE_RANK = ("rollout.placement.num_ranks=1",)
TWO_DEVICES = (
    "cluster.runtime=inline",  # on Ray it asks for three cores
    "cluster.pools={main: [1], sampling: [1]}", "rollout.placement.pool=sampling", "rollout.mesh.tp=2",
)  # fmt: skip
TWO_RANKS = ("cluster.pools={main: [2]}", "actor.mesh.dp_shard=2", "rollout.mesh.tp=2")  # which share a server
ADAPTED = ("model.lora={rank: 8, alpha: 32}",)
RELAYED = ("rollout.weights=broadcast",)
TWO_POOLS = ("cluster.pools={main: [1], sampling: [1]}", "rollout.placement.pool=sampling")


@pytest.mark.parametrize(
    "kind",
    [
        ONE_RANK,
        ONE_RANK + ADAPTED,
        TWO_DEVICES,
        TWO_DEVICES + ADAPTED,
        TWO_RANKS,
        ONE_RANK + RELAYED,
        TWO_POOLS + RELAYED,
    ],
    ids=[
        "all weights",
        "adapters",
        "two devices",
        "adapters on two devices",
        "devices of two ranks",
        "relayed, colocated",
        "relayed",
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_run_samples_what_it_trains_publishes_at_every_step_and_answers_outsiders(tmp_path, kind):
    overrides = [
        *kind, "rollout.engine=vllm", "rollout={num_prompts: 32, group_size: 4}",
        "data.generate.num_validation_prompts=32", "validation.every_steps=6", "trainer.num_steps=6", "rollout.serve=0",
        f"trainer.runs_dir={tmp_path}", "trainer.name=run",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rallypoint.cli.main", "train", "digits", *overrides]
    caller = Caller(tmp_path / "run")
    caller.start()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    caller.join(60)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in record]
    assert len(steps) == 6
    assert all(record["rollout/logprob_gap_max"] < 1e-3 for record in steps)
    assert all(record["rollout/failed"] == 0 for record in steps)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]
    assert [path.name for path in (tmp_path / "run" / "logs").glob("vllm-*.log")] == ["vllm-0.log"]
    assert "from a folder" not in done.stdout + done.stderr
    assert caller.statuses[0] == 401
    assert set(caller.statuses[1:]) <= {200, 500, 503}
    assert len({version for choice in caller.choices for version in choice["versions"]}) > 1, caller.statuses
    assert all(len(choice["token_ids"]) >= 1 for choice in caller.choices)
    assert any(text.endswith("data: [DONE]\n\n") for text in caller.streamed)


def servers_of(folder: Path) -> list[str]:
    """Return the command lines of servers whose model is below a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return [line for line in found if "vllm" in line and f"--model={folder}" in line]


@pytest.mark.usefixtures("installed")
def test_a_run_whose_ranks_share_a_server_loses_one_without_a_server_and_goes_on(tmp_path):
    """What samples and trains in the process is made again, with a new server; the old one does not stay."""
    overrides = [
        *TWO_RANKS, "rollout.engine=vllm", "rollout={num_prompts: 8, group_size: 4}", "trainer.num_steps=3",
        "data.generate.num_validation_prompts=4", f"trainer.runs_dir={tmp_path}", "trainer.name=run",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rallypoint.cli.main", "train", "digits", *overrides]
    fails = {**os.environ, "RALLY_FAIL": "rollout.advance:step=2:rank=1:kill"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=fails)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [entry.event for entry in read_journal(tmp_path / "run" / "journal.jsonl")]
    lost = [(event.role, event.rank) for event in events if isinstance(event, RoleLost)]
    assert lost == [("rollout", 1)]
    assert len([event for event in events if isinstance(event, RolesRestarted)]) == 1
    assert {event.step for event in events if isinstance(event, StepDone)} == {1, 2, 3}
    assert servers_of(tmp_path) == []


@pytest.mark.usefixtures("installed")
def test_a_run_that_samples_ahead_gets_new_weights_in_the_middle_of_responses(tmp_path):
    overrides = [
        # So few rows at once, and no critic: sampling takes longer than training, and goes on when weights arrive.
        "rollout.engine=vllm", "rollout={num_prompts: 16, group_size: 4, max_staleness: 1, max_batch_rows: 8}",
        "rollout={max_response_tokens: 60, min_response_tokens: 60}",
        "cluster.pools={main: [1], sampling: [1]}", "rollout.placement.pool=sampling",
        "data.generate.num_validation_prompts=8", "validation.every_steps=8", "trainer.num_steps=8",
        f"trainer.runs_dir={tmp_path}", "trainer.name=run",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rallypoint.cli.main", "train", "digits-grpo", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in record]
    assert len(steps) == 8
    assert all(record["rollout/failed"] == 0 for record in steps)
    assert all(record["rollout/staleness_max"] <= 1 for record in steps)
    mixed = [record for record in steps if 0 < record["rollout/staleness_mean"] < 1]
    if not mixed:
        pytest.skip("on this machine training takes longer than sampling: no weights came in the middle of a response")
    assert all(record["rollout/logprob_gap_max"] < 1e-3 for record in mixed)  # newer tokens, from keys computed again
