"""A trained model at work: scored on a data set, or in conversation. One process, no Ray."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from rallypoint import checkpoint as checkpoints
from rallypoint.config import LoRAConfig, OnTooLong, RunConfig, TrainerConfig, load_config
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
from rallypoint.data.tokenizer import TokenTexts
from rallypoint.environments.failures import RewardFailure
from rallypoint.environments.grader import open_grader
from rallypoint.environments.scoring import Scored, ScoredGroup, Scoring, combine
from rallypoint.errors import ModelError, RewardError
from rallypoint.generation import NativeEngine, Request, SamplingParams, generate, stream
from rallypoint.model_files import is_adapter, load_new_reward_model, load_policy, open_adapter
from rallypoint.models import ModelShard
from rallypoint.prepare.data_notes import say_fates
from rallypoint.prepare.model_folders import is_hub_name
from rallypoint.prepare.model_limits import RowLimits, check_ids, stop_tokens
from rallypoint.prepare.own_functions import rewards_for
from rallypoint.run.folder import named_run
from rallypoint.sampling.client import sampling_params
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
class Evaluation:
    """How a model did on a data set."""

    scores: tuple[float, ...]
    """One for each response that could be scored."""
    failures: tuple[RewardFailure, ...]
    num_prompts: int
    num_tokens: int
    num_truncated: int
    best: tuple[Example, str, float]
    worst: tuple[Example, str, float]

    @property
    def mean(self) -> float:
        """Mean score of the responses that have one."""
        return sum(self.scores) / len(self.scores)


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
        checkpoints.verify(path)
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
    if not Path(base).expanduser().is_dir() and not is_hub_name(base):
        raise ModelError(
            f"{adapter}: an adapter for the model {base!r}, and there is no such folder; put the model back there, or "
            "change base_model_name_or_path in adapter_config.json of a copy"
        )
    return base


def evaluate(
    trained: Trained,
    data: Sequence[str],
    *,
    reward: str | Mapping[str, str] | None,
    temperature: float,
    num_samples: int,
    max_response_tokens: int | None,
    max_prompts: int | None,
    seed: int,
    say: Callable[[str], None],
) -> Evaluation:
    """Sample responses to every prompt of a data set and score them by one function, or by the sum of several.

    Raises:
        RewardError: no reward function is known or may be run, or it failed on every response.
        DataError: the data set has bad rows.
        ModelError: the folder cannot be loaded.
    """
    config = trained.config
    if config is not None and config.rollout.episode is not None:
        say("single turns are scored: the run's rollout.episode is not used here")
    with contextlib.closing(open_grader(rewards_for(trained.path, config, reward))) as grader:
        grader.load()
        columns = config.data.columns.named if config and config.data.columns else {}
        sampled = _sample(
            trained,
            load_dataset([DataSet(path, columns=columns) for path in data])[:max_prompts],
            temperature=temperature,
            num_samples=num_samples,
            max_response_tokens=max_response_tokens,
            seed=seed,
            on_too_long=config.data.on_too_long if config else "error",
            say=say,
        )
        batch, examples = sampled.batch, sampled.prompts.examples
        texts = TokenTexts(sampled.tokenizer)
        scoring = Scoring(grader, decode=sampled.texts, token_texts=texts, num_rows=len(batch), warn=say)
        scoring.add(0, batch, [examples[int(index)] for index in batch.prompt_index])
        scoring.finish()
        (group,) = scoring.run()
        return _summarise(group, combine([group]), len(examples))


def complete(
    trained: Trained, data: str, *, temperature: float, max_response_tokens: int | None, seed: int
) -> list[str]:
    """Return one response to each prompt of a file.

    Raises:
        DataError: the data set has bad rows.
        ModelError: the folder cannot be loaded, or a prompt is too long.
    """
    sampled = _sample(
        trained,
        load_dataset([DataSet(data)], require_ground_truth=False).examples,
        temperature=temperature,
        num_samples=1,
        max_response_tokens=max_response_tokens,
        seed=seed,
        on_too_long="error",
        say=lambda _: None,
    )
    return sampled.texts([sampled.batch.response(row).tolist() for row in range(len(sampled.batch))])


@dataclasses.dataclass(frozen=True, slots=True)
class _Sampled:
    """Responses to the prompts of a data set."""

    tokenizer: PreTrainedTokenizerBase
    prompts: EncodedPrompts
    batch: RolloutBatch

    def texts(self, responses: list[list[int]]) -> list[str]:
        """Return the texts of responses, without special tokens."""
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)


def _sample(
    trained: Trained,
    examples: Sequence[Example],
    *,
    temperature: float,
    num_samples: int,
    max_response_tokens: int | None,
    seed: int,
    on_too_long: OnTooLong,
    say: Callable[[str], None],
) -> _Sampled:
    config = trained.config
    tokenizer = load_tokenizer(trained.tokenizer_path, trust_remote_code=trained.trusts_remote_code)
    engine = _engine(trained, tokenizer)
    limits = RowLimits.of(engine.model.config)
    most = limits.max_data_tokens(config) if config else 4096
    encoded = encode_prompts(
        tokenizer, examples, max_prompt_tokens=most, on_too_long=on_too_long, num_ids=limits.num_ids
    )
    say_fates(encoded, most, say)
    usual = config.rollout.max_response_tokens if config else 512
    limit = _response_limit(trained, engine, encoded, max_response_tokens, usual)
    prompts = Prompts(
        offsets=offsets_from_lengths(torch.tensor([len(ids) for ids in encoded.token_ids])),
        tokens=torch.tensor([token for ids in encoded.token_ids for token in ids]),
        prompt_index=torch.arange(len(encoded.token_ids)),
    )
    params = _params(trained, tokenizer, engine, temperature, limit, seed)
    batch = generate(engine, prompts, params, version=0, group_size=num_samples)
    return _Sampled(tokenizer, encoded, batch)


def _summarise(group: ScoredGroup, scored: Scored, num_prompts: int) -> Evaluation:
    if not len(scored.batch):
        raise RewardError(f"no response could be scored; the first: {scored.failures[0]}")
    scores = scored.batch.scores.tolist()
    best, worst = (
        (group.examples[scored.kept_rows[place]], group.texts[scored.kept_rows[place]], scores[place])
        for place in (
            max(range(len(scores)), key=scores.__getitem__),
            min(range(len(scores)), key=scores.__getitem__),
        )
    )
    return Evaluation(
        scores=tuple(scores),
        failures=scored.failures,
        num_prompts=num_prompts,
        num_tokens=group.rows.num_loss_tokens,
        num_truncated=int(group.rows.truncated.sum()),
        best=best,
        worst=worst,
    )


def _response_limit(
    trained: Trained, engine: NativeEngine, encoded: EncodedPrompts, wanted: int | None, usual: int
) -> int:
    """Return how long responses may be; beyond the positions that the model knows it would only babble.

    Raises:
        ModelError: the longest prompt leaves less room than is wanted, or none.
    """
    longest = max(map(len, encoded.token_ids))
    room = engine.max_request_tokens - longest
    if (wanted or 1) > room:
        raise ModelError(
            f"{trained.path}: supports rows of {longest + room} tokens, but the longest prompt has {longest} and a "
            f"response may have {wanted or usual}; lower --max-response-tokens, or leave long prompts out"
        )
    return wanted or min(usual, room)


class Conversation:
    """Turns of a user and a model, each answer streamed as it is sampled."""

    def __init__(self, trained: Trained, *, temperature: float, max_response_tokens: int, seed: int) -> None:
        self._tokenizer = load_tokenizer(trained.tokenizer_path, trust_remote_code=trained.trusts_remote_code)
        self._decode = decoder(self._tokenizer)
        self._engine = _engine(trained, self._tokenizer)
        self._params = _params(trained, self._tokenizer, self._engine, temperature, max_response_tokens, seed)
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


def _engine(trained: Trained, tokenizer: PreTrainedTokenizerBase) -> NativeEngine:
    rows = trained.config.rollout.max_batch_rows if trained.config else 64
    model = trained.load().model
    check_ids(trained.path, TemplateProbe.of(tokenizer).ids, tokenizer, RowLimits.of(model.config).num_ids)
    return NativeEngine(model, max_rows=rows, decode=decoder(tokenizer))


def _params(
    trained: Trained,
    tokenizer: PreTrainedTokenizerBase,
    engine: NativeEngine,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> SamplingParams:
    """Return how tokens are drawn: as in training, where the model comes from a run, but for what is asked for."""
    stops = stop_tokens(trained.model_path, tokenizer, RowLimits.of(engine.model.config).num_ids)
    asked = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stop_tokens=stops)
    if trained.config is None:
        return asked
    usual = sampling_params(trained.config.rollout, seed=seed, stop_tokens=stops)
    return dataclasses.replace(
        usual,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min(usual.min_new_tokens, max_new_tokens),
        temperature=temperature,
    )
