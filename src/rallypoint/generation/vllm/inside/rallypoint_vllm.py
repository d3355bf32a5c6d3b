"""What vLLM's own processes load of rallypoint, in an environment that has vLLM's packages and none of ours.

Owns: how tokens are sampled there (`Drawn` and `DrawnOnCpu`, logits processors) and how published weights enter the
model (`Loading`, an extension of its worker). All are extension points of vLLM: nothing of it is replaced. Of
rallypoint only modules that need torch alone are imported, past the packages' `__init__`, which would import more.

Invariant: the tokens and logprobs of a request are those of our own engines for the same logits.
"""

from __future__ import annotations

import importlib.machinery
import json
import mmap
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from vllm import SamplingParams as VLLMSamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor as FirstLogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

_PACKAGE = Path(__file__).resolve().parents[3]


def _borrow(name: str, folder: Path) -> None:
    """Make modules of a package importable without its `__init__`."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = package


_borrow("rallypoint", _PACKAGE)
for _name in ("cluster", "config", "generation", "generation.vllm", "model_files", "models", "weights"):
    _borrow(f"rallypoint.{_name}", _PACKAGE.joinpath(*_name.split(".")))

from rallypoint.generation.vllm.sampler import Encoded, MovingRows, Slots  # noqa: E402 - only now can it be found
from rallypoint.weights.served import Invitation, ServerReceiver  # noqa: E402

_REFUSED = (ValueError, KeyError, RuntimeError, AttributeError, AssertionError)
"""What a model raises that does not take weights, and a connection that ended."""


class Drawn(LogitsProcessor):
    """Samples the tokens of requests with their own random numbers, in the second model runner; see `sampler.Slots`."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        del vllm_config
        every = req_states.all_token_ids

        def tokens(slot: int, number: int) -> list[int]:
            return every.gpu[slot, :number].tolist()  # the host waits, for what only requests with penalties need

        self._slots = Slots(req_states.device, tokens)
        self._beat = _heartbeat()

    def add_request(self, req_idx: int, sampling_params: VLLMSamplingParams) -> bool:
        """Take the arguments of a request that enters a slot; return whether they are ours."""
        return self._slots.add(req_idx, _asked(sampling_params))

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Make the sampled token of each row the likeliest one; a request has one row, as nothing is speculated."""
        self._beat()
        return self._slots.draw(logits, ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist())


class DrawnOnCpu(FirstLogitsProcessor):
    """The same in the first model runner, for the second one needs Triton; see `sampler.MovingRows`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._rows = MovingRows(device)
        self._beat = _heartbeat()

    @classmethod
    def validate_params(cls, sampling_params: VLLMSamplingParams) -> None:
        """Accept all: requests without our arguments are left alone."""

    def is_argmax_invariant(self) -> bool:
        """Return False, so that vLLM applies it to greedy requests, too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch: those that leave, join and move, in this order."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._rows.remove(place)
        for place, params, prompt, response in batch_update.added:
            self._rows.add(place, _asked(params), prompt or (), response)
        for start, end, direction in batch_update.moved:
            self._rows.move(start, end, swap=direction == MoveDirectionality.SWAP)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Make the sampled token of each row the likeliest one."""
        self._beat()
        return self._rows.draw(logits)


def _asked(params: VLLMSamplingParams) -> Encoded | None:
    """Return our arguments of a request; None if it has none."""
    return (params.extra_args or {}).get("rallypoint")


class Loading:
    """Loads published weights in vLLM's worker, from the memory of the ranks that send them or from a folder.

    See `rallypoint.weights.served` and `rallypoint.weights.published_folder`.
    """

    rallypoint_version: int | None = None
    """Version of the weights that this worker holds whole; None while it holds those it began with, or may hold a
    mixture."""
    rallypoint_receiver: ServerReceiver | None = None
    """Connection to the ranks that send weights, once there is one."""

    def rallypoint_join(self, told: str) -> dict[str, object]:
        """Connect to the ranks that send weights; `told` is an invitation.

        Returns:
            `error`, None if it is connected.
        """
        self.rallypoint_leave()
        try:
            self.rallypoint_receiver = ServerReceiver(Invitation.read(told), self.rank, self.device)  # pyright: ignore[reportAttributeAccessIssue]
        except (OSError, RuntimeError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": None}

    def rallypoint_leave(self) -> None:
        """Close the connection, if there is one."""
        if self.rallypoint_receiver is not None:
            self.rallypoint_receiver.close()
            self.rallypoint_receiver = None

    def rallypoint_receive(self, version: int) -> dict[str, object]:
        """Take over weights as they arrive; see `rallypoint_load`.

        Checksums are compared: on processors before a tensor is loaded, on accelerators at the end.

        Returns:
            What `rallypoint_load` returns, and `digest`, of all checksums.
        """
        self.rallypoint_version = None
        try:
            assert self.rallypoint_receiver is not None, "it was not told to join"
            self.reload_weights(weights_iterator=self.rallypoint_receiver.tensors(version))  # pyright: ignore[reportAttributeAccessIssue]
        except _REFUSED as error:
            self.rallypoint_leave()  # who still sends fails, and does not wait
            return {"version": None, "error": f"{type(error).__name__}: {error}"}
        self.rallypoint_version = version
        return {"version": version, "error": None, "digest": self.rallypoint_receiver.digest}

    def rallypoint_load(self, folder: str) -> dict[str, object]:
        """Take over the weights, or the adapter, of a folder, after every tensor of it was compared with the manifest.

        Returns:
            `version`, of the weights that are held now (None: of none that can be named), and `error`, None if they are
            those of the folder.
        """
        try:
            manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
            tensors = _verified(Path(folder), manifest["tensors"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            return {"version": self.rallypoint_version, "error": f"{folder}: {error}"}
        self.rallypoint_version = None
        try:
            if manifest["kind"] == "adapter":
                self.add_lora(LoRARequest("rallypoint", 1, folder, load_inplace=True))  # pyright: ignore[reportAttributeAccessIssue]
            else:
                self.reload_weights(weights_iterator=tensors.items())  # pyright: ignore[reportAttributeAccessIssue]
        except _REFUSED as error:
            return {"version": None, "error": f"{folder}: {type(error).__name__}: {error}"}
        self.rallypoint_version = manifest["version"]
        return {"version": self.rallypoint_version, "error": None}


def _verified(folder: Path, described: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder, as views of its files.

    Raises:
        ValueError: one is missing, or differs from what is described.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({tensor["file"] for tensor in described.values()}):
        # Mapped, not read: a tensor is copied once, into the model.
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensors[name] = opened.get_tensor(name)
    wrong = sorted(tensors.keys() ^ described.keys()) or [
        name
        for name, tensor in tensors.items()
        if list(tensor.shape) != described[name]["shape"] or _checksum(tensor) != described[name]["xxh3_64"]
    ]
    if wrong:
        raise ValueError(f"differs from its manifest in {', '.join(wrong[:5])}")
    return tensors


def _checksum(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _heartbeat() -> Callable[[], None]:
    """Return a function that counts up in the file that RALLYPOINT_BEAT names: a sign of life."""
    path = os.environ.get("RALLYPOINT_BEAT")
    if path is None:
        return lambda: None
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    count = 0

    def beat() -> None:
        nonlocal count
        count += 1
        shared[:8] = count.to_bytes(8, "little")

    return beat
