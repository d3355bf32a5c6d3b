"""A trained model at work: it answers the prompts of a data set, or talks. One process, no Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Self, cast

import torch
from transformers import PreTrainedTokenizerBase

from rallypoint import checkpoint as checkpoints
from rallypoint.config import LoRAConfig, RunConfig, TrainerConfig, load_config
from rallypoint.config.sections.material import OnTooLong
from rallypoint.data import (
    DataSet,
    EncodedPrompts,
    Example,
    TemplateProbe,
    chat_text,
    decoder,
    encode_prompts,
    load_dataset,
    load_tokenizer,
)
from rallypoint.data.files import is_url
from rallypoint.data.remote import cache_folder, here
from rallypoint.errors import ModelError
from rallypoint.generation import NativeEngine, Request, SamplingParams, generate, stream
from rallypoint.model_files import is_adapter, load_new_reward_model, load_policy, open_adapter
from rallypoint.models import ModelShard
from rallypoint.prepare.data_notes import say_fates
from rallypoint.prepare.model_folders import is_hub_name
from rallypoint.prepare.model_limits import RowLimits, check_ids, stop_tokens
from rallypoint.run.copies import borrow_checkpoint
from rallypoint.run.folder import named_run
from rallypoint.types import Prompts, RolloutBatch, offsets_from_lengths


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """A model folder or an adapter, and the config of the run that made it if it lies in one."""

    path: str
    config: RunConfig | None
    base: str | None = None
    """Folder or hub name of the model that the adapter belongs to; None when `path` is a whole model."""
    trusts_remote_code: bool = False
    """Whether Python code of the model's folder may run. That its run was told so does not count: the run may be
    somebody else's."""

    @property
    def model_path(self) -> str:
        """Where the model's own files are."""
        return self.base or self.path

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is: an adapter may have brought one."""
        return self.path if (Path(self.path) / "tokenizer_config.json").is_file() else self.model_path

    def load(self, dtype: str | None = None) -> ModelShard:
        """Load the policy, with its adapter if it is one; by default in the type that it was trained in.

        The adapter of a reward model gives that.

        Raises:
            ModelError: the folder cannot be loaded.
        """
        is_reward_model = self.base is not None and open_adapter(self.path).is_reward_model
        load = load_new_reward_model if is_reward_model else load_policy
        return load(
            self.model_path,
            dtype=dtype or (self.config.model.dtype if self.config else "float32"),
            trust_remote_code=self.trusts_remote_code,
            lora=LoRAConfig(path=self.path) if self.base else None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """How a model is asked."""

    temperature: float = 1.0
    """0 is greedy."""
    num_samples: int = 1
    """Responses, or episodes, of each prompt."""
    max_response_tokens: int | None = None
    """Most tokens of a response; None: as in training, or 512."""
    seed: int = 0


def find_trained(name: str, *, trust_remote_code: bool = False) -> Trained:
    """Return the model that a checkpoint, a run by its folder or name, a Hugging Face folder or a hub name stands for.

    Args:
        name: of it.
        trust_remote_code: whether Python code of the model's folder may run.

    Raises:
        ModelError: there is no such folder, or a run folder that has no checkpoint yet.
        CheckpointError: a checkpoint is damaged.
        ConfigError: the config of its run cannot be read.
    """
    if is_url(name):
        name = str(borrow_checkpoint(name) or here(name))
    path = Path(name).expanduser().absolute()
    if not path.is_dir() and (named := named_run(name, Path(TrainerConfig().runs_dir))) is not None:
        path = named.absolute()
    if (path / "config.yaml").is_file():
        found = checkpoints.visible(path / "checkpoints")
        if not found:
            raise ModelError(f"{name}: this run has no checkpoint yet")
        path = path / "checkpoints" / checkpoints.checkpoint_name(found[-1])
        checkpoints.verify(path)
    elif (path / checkpoints.MANIFEST).is_file():
        checkpoints.verify(path, to_resume=not path.is_relative_to(cache_folder()))  # copies there have no such state
    if not path.is_dir() and not is_hub_name(name):
        raise ModelError(f"{name}: no such folder (looked in {Path.cwd()}); expected a checkpoint, a run or a model")
    is_checkpoint = path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file()
    config = load_config(str(path.parent.parent)).config if is_checkpoint else None
    return Trained(
        path=str(path) if path.is_dir() else name,
        config=config,
        base=_base(path, config) if is_adapter(str(path)) else None,
        trusts_remote_code=trust_remote_code,
    )


def _base(adapter: Path, config: RunConfig | None) -> str:
    """Return the model that an adapter belongs to; in a run that was moved, the one that moved with it."""
    base = open_adapter(str(adapter)).base
    if config is not None:
        base = config.model.path or str(adapter.parent.parent / "model")
    if not Path(base).expanduser().is_dir() and not is_hub_name(base) and not is_url(base):
        raise ModelError(
            f"{adapter}: an adapter for the model {base!r}, and there is no such folder; put the model back there, or "
            "change base_model_name_or_path in adapter_config.json of a copy"
        )
    return base


def complete(trained: Trained, data: str, asked: Asked) -> list[str]:
    """Return one response to each prompt of a file.

    Raises:
        DataError: the data set has bad rows.
        ModelError: the folder cannot be loaded, or a prompt is too long.
    """
    opened = Opened.of(trained)
    examples = load_dataset([DataSet(data)], require_ground_truth=False).examples
    batch = opened.answers(opened.encode(examples, on_too_long="error", say=lambda _: None), asked)
    return list(opened.texts([batch.response(row).tolist() for row in range(len(batch))]))


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A model that was loaded, with its tokenizer."""

    trained: Trained
    tokenizer: PreTrainedTokenizerBase
    engine: NativeEngine
    """Exact if that of its run was."""

    @classmethod
    def of(cls, trained: Trained) -> Self:
        """Load a model.

        Raises:
            ModelError: the folder cannot be loaded.
        """
        config = trained.config
        tokenizer = load_tokenizer(trained.tokenizer_path, trust_remote_code=trained.trusts_remote_code)
        model = trained.load().model
        check_ids(trained.path, TemplateProbe.of(tokenizer).ids, tokenizer, RowLimits.of(model.config).num_ids)
        engine = NativeEngine(
            model,
            max_rows=config.rollout.max_batch_rows if config else 64,
            mode="exact" if config and config.rollout.exact else "fast",
            decode=decoder(tokenizer),
        )
        return cls(trained, tokenizer, engine)

    @property
    def limits(self) -> RowLimits:
        """What the model can take."""
        return RowLimits.of(self.engine.model.config)

    def texts(self, responses: list[list[int]]) -> Sequence[str]:
        """Return the texts of responses, without special tokens."""
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)

    def encode(
        self, examples: Sequence[Example], *, on_too_long: OnTooLong, say: Callable[[str], None]
    ) -> EncodedPrompts:
        """Return prompts as token ids, as in training."""
        limits, config = self.limits, self.trained.config
        most = limits.max_data_tokens(config) if config else 4096
        encoded = encode_prompts(
            self.tokenizer, examples, max_prompt_tokens=most, on_too_long=on_too_long, num_ids=limits.num_ids
        )
        say_fates(encoded, most, say)
        return encoded

    def answers(self, encoded: EncodedPrompts, asked: Asked) -> RolloutBatch:
        """Sample responses to prompts.

        Raises:
            ModelError: a prompt is too long.
        """
        prompts = Prompts(
            offsets=offsets_from_lengths(torch.tensor([len(ids) for ids in encoded.token_ids])),
            tokens=torch.tensor([token for ids in encoded.token_ids for token in ids]),
            prompt_index=torch.arange(len(encoded.token_ids)),
        )
        params = self.params(asked, self._room(encoded, asked))
        return generate(self.engine, prompts, params, version=0, group_size=asked.num_samples)

    def response_limit(self, asked: Asked) -> int:
        """Return how long responses may be, if their prompts leave room for it."""
        config = self.trained.config
        return asked.max_response_tokens or (config.rollout.max_response_tokens if config else 512)

    def _room(self, encoded: EncodedPrompts, asked: Asked) -> int:
        """Return how long responses may be; beyond the positions that the model knows it would only babble.

        Raises:
            ModelError: the longest prompt leaves less room than is wanted, or none.
        """
        longest, wanted, usual = max(map(len, encoded.token_ids)), asked.max_response_tokens, self.response_limit(asked)
        room = self.engine.max_request_tokens - longest
        if (wanted or 1) > room:
            raise ModelError(
                f"{self.trained.path}: supports rows of {longest + room} tokens, but the longest prompt has {longest} "
                f"and a response may have {usual}; lower --max-response-tokens, or leave long prompts out"
            )
        return wanted or min(usual, room)

    def params(self, asked: Asked, max_new_tokens: int) -> SamplingParams:
        """Return how tokens are drawn: as in training, where the model comes from a run, but for what is asked for."""
        trained = self.trained
        stops = stop_tokens(trained.model_path, self.tokenizer, self.limits.num_ids)
        if trained.config is None:
            return SamplingParams(
                max_new_tokens=max_new_tokens, temperature=asked.temperature, seed=asked.seed, stop_tokens=stops
            )
        usual = SamplingParams.of(trained.config.rollout, seed=asked.seed, stop_tokens=stops)
        return dataclasses.replace(
            usual,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(usual.min_new_tokens, max_new_tokens),
            temperature=asked.temperature,
        )


class Conversation:
    """Turns of a user and a model, each answer streamed as it is sampled."""

    def __init__(self, trained: Trained, *, temperature: float, max_response_tokens: int, seed: int) -> None:
        opened, asked = Opened.of(trained), Asked(temperature=temperature, seed=seed)
        self._tokenizer, self._engine = opened.tokenizer, opened.engine
        self._decode = decoder(self._tokenizer)
        self._params = opened.params(asked, max_response_tokens)
        self._max_positions = self._engine.max_request_tokens
        self._messages: list[dict[str, str]] = []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Add a user's turn and yield the answer piece by piece; both become part of the conversation at its end."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = ""
            for so_far in self._answers():
                yield so_far[len(answer) :]
                answer = so_far
            self._messages.append({"role": "assistant", "content": answer})
        finally:
            if self._messages[-1:] == [{"role": "user", "content": text}]:
                self._messages.pop()

    def _answers(self) -> Iterator[str]:
        """Yield the answer to the last turn, as far as it is known, again and again."""
        ids = self._fitting_ids()
        room = self._max_positions - len(ids)
        params = dataclasses.replace(self._params, max_new_tokens=min(self._params.max_new_tokens, room))
        request = Request(tokens=tuple(ids), params=params, prompt_index=len(self._messages), streamed=True)
        tokens: list[int] = []
        text = ""
        for output in stream(self._engine, request):
            tokens += output.tokens
            text = self._decode(tokens)
            # A character of several tokens is incomplete until its last one.
            if not text.endswith("\ufffd"):
                yield text
        yield text

    def _fitting_ids(self) -> list[int]:
        """Return the conversation as token ids; its oldest turns are forgotten when it is too long to answer."""
        while True:
            text = chat_text(self._tokenizer, self._messages)
            ids = cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))
            if len(ids) + min(self._params.max_new_tokens, self._max_positions // 2) <= self._max_positions:
                return ids
            if len(self._messages) == 1:
                raise ModelError(f"this message has {len(ids)} tokens; the model supports {self._max_positions} in all")
            del self._messages[:2]

    def forget(self) -> None:
        """Begin a new conversation."""
        self._messages.clear()
