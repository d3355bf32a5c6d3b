"""What a run is made of before a role exists: tokenizer, prompts and reward function, read or made.

`--dry-run` and `rally train` examine the same, in this order: whether pools and plan fit the machine; the weights of
local folders, by the headers of their files; tokenizer, chat template, prompts and reward function.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rallypoint.config import RECIPES, LoadedConfig, RunConfig
from rallypoint.config.fields import changed
from rallypoint.config.sections.material import weight_of
from rallypoint.data import (
    Conversations,
    DataSet,
    EncodedPrompts,
    EncodedRows,
    Example,
    RowStream,
    StreamedPrompts,
    StreamedRows,
    encode_prompts,
    encode_rows,
    load_conversations,
    load_dataset,
)
from rallypoint.data.template import CLOCK, hold_clock
from rallypoint.environments.agents import is_agent
from rallypoint.environments.blocking import is_blocking
from rallypoint.environments.environment import Episode
from rallypoint.environments.given import GIVEN
from rallypoint.environments.grader import probe_rewards
from rallypoint.environments.reward import opens_sandbox
from rallypoint.environments.sandbox import SandboxError, open_sandbox
from rallypoint.errors import RewardError
from rallypoint.model_files.locate import quiet_transformers
from rallypoint.prepare.check_reward import ask_once
from rallypoint.prepare.data_notes import Training, check_sources, check_truths, repetitions, say_fates
from rallypoint.prepare.machine import check_machine
from rallypoint.prepare.made import made_data, made_model
from rallypoint.prepare.model_folders import adapter_notes
from rallypoint.prepare.model_limits import RowLimits, check_weights, id_notes, read_models, template_notes
from rallypoint.prepare.own_functions import check_own_functions
from rallypoint.prepare.plan import make_plan
from rallypoint.run.data_sets import data_sets
from rallypoint.run.folder import RunFolder


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run reads before it makes anything."""

    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]
    limits: tuple[RowLimits, ...]
    """Limits of every model that reads the rows."""
    train: Training | None
    """Training data; None if data.generate makes it."""
    validation: EncodedPrompts | EncodedRows | None
    notes: tuple[str, ...] = ()
    """Notes on the prompts, a line each."""
    clock: str | None = None
    """Time that the chat template shows; None if it shows none, or the config sets it."""
    episode: Episode | None = None
    """The episode that the config names, or one with its tools; a server of tools is started only here."""

    def encode(
        self,
        config: RunConfig,
        paths: Sequence[str | Path | DataSet],
        say: Callable[[str], None],
        max_rows: int | None = None,
    ) -> EncodedPrompts | EncodedRows:
        """Read files of prompts, or of conversations or pairs, and encode them for the models of a run.

        Raises:
            DataError: they have bad rows, or some that are too long.
            ModelError: a model does not support rows of the length that the config asks for.
        """
        kind = RECIPES[config.recipe].examples
        if kind != "prompts":
            found = self._encode_rows(config, load_conversations(paths, kind, max_rows=max_rows))
        else:
            rows = load_dataset(paths, require_ground_truth=_reads_truth(config), max_rows=max_rows)
            found = dataclasses.replace(self._encode_prompts(config, rows), is_part=rows.is_part)
            check_truths(config, found)
        say_fates(found, self.most_tokens(config), say)
        return found

    def stream(self, config: RunConfig, say: Callable[[str], None]) -> StreamedPrompts | StreamedRows:
        """Read the first rows of the training data, and encode the rest as the run goes.

        Args:
            config: of the run, with stream_rows in data.train.
            say: called with a line on what is too long in a window.

        Raises:
            DataError: the first rows are bad; later ones raise it when they are read.
        """
        assert config.data.stream_rows is not None, "or there is nothing to stream"
        kind, on_too_long = RECIPES[config.recipe].examples, config.data.on_too_long
        datasets, weights = data_sets(config, "data.train"), [weight_of(one) for one in config.data.train]
        if kind != "prompts":
            return StreamedRows(
                RowStream.of_conversations(datasets, kind),
                lambda read: self._encode_rows(config, Conversations.of(read), may_be_empty=True),
                lambda found: say_fates(found, self.most_tokens(config), say),
                num_rows=config.data.stream_rows,
                seed=config.seed,
                shuffle=config.data.shuffle,
                keeps_all=on_too_long == "error",  # one that is cut may lose all that is trained
            )
        parts = [[one] for one in datasets] if any(weights) else [datasets]
        return StreamedPrompts(
            [RowStream.of_prompts(part, require_ground_truth=_reads_truth(config)) for part in parts],
            lambda examples: self._encode_prompts(config, examples, may_be_empty=True),
            lambda found: say_fates(found, self.most_tokens(config), say),
            num_rows=config.data.stream_rows,
            seed=config.seed,
            shuffle=config.data.shuffle,
            weights=[weight or 1.0 for weight in weights] if any(weights) else (1.0,),
            keeps_all=on_too_long != "drop",
        )

    def _encode_rows(self, config: RunConfig, found: Conversations, *, may_be_empty: bool = False) -> EncodedRows:
        return encode_rows(
            self.tokenizer,
            found,
            stop_tokens=self.stop_tokens,
            max_row_tokens=self.most_tokens(config),
            on_too_long=config.data.on_too_long,
            num_ids=self._num_ids,
            may_be_empty=may_be_empty,
        )

    def _encode_prompts(
        self, config: RunConfig, examples: Sequence[Example], *, may_be_empty: bool = False
    ) -> EncodedPrompts:
        return encode_prompts(
            self.tokenizer,
            examples,
            max_prompt_tokens=self.most_tokens(config),
            on_too_long=config.data.on_too_long,
            num_ids=self._num_ids,
            may_be_empty=may_be_empty,
        )

    @property
    def _num_ids(self) -> int | None:
        return min((each.num_ids for each in self.limits if each.num_ids is not None), default=None)

    def most_tokens(self, config: RunConfig) -> int:
        """Return the longest prompt, or row, that every model can read; see `RowLimits.max_data_tokens`."""
        return min(each.max_data_tokens(config) for each in self.limits)

    def dated(self, loaded: LoadedConfig) -> LoadedConfig:
        """Return the config with the time that prompts show in it, so that they show the same after a resume."""
        if self.clock is None:
            return loaded
        template = {**(loaded.config.data.template or {}), CLOCK: self.clock}
        overrides = (*loaded.overrides, f'data.template.{CLOCK}="{self.clock}"')
        return dataclasses.replace(
            loaded, config=changed(loaded.config, {"data.template": template}), overrides=overrides
        )

    def settled(self, config: RunConfig) -> RunConfig:
        """Return the config with the number of steps that follows from trainer.num_epochs; unchanged without that key.

        The last step on files takes what is left. A step on prompts takes exactly rollout.num_prompts; the
        remainder is left out.
        """
        trainer, made = config.trainer, config.data.generate
        num = made.num_train_prompts if made is not None else 0 if self.train is None else len(self.train)
        if trainer.num_epochs is None:
            return config
        num_whole = trainer.num_epochs * num / config.num_examples
        num_steps = max(1, math.ceil(num_whole) if config.trains_on_files else math.floor(num_whole))
        return changed(config, {"trainer.num_steps": num_steps})


def _reads_truth(config: RunConfig) -> bool:
    """Whether anything reads the ground truth: not so if only teachers and reward models score."""
    return bool(config.reward.all_functions) or "{ground_truth}" in (config.teachers.hint or "")


def read_inputs(config: RunConfig, *, max_rows: int | None = None) -> Inputs:
    """Read everything that a run begins with.

    Args:
        config: of the run.
        max_rows: of training and of validation prompts each; None for all.

    Raises:
        DataError: a data set has bad rows, or prompts that are too long.
        ModelError: the model folder, that of the reward model, or a tokenizer of theirs cannot be used.
        RewardError: the reward function cannot be loaded, or is one of a whole step, which this config does not score
            at once.
        ConfigError: a loss or an advantage of one's own breaks a rule; or no row is of the source of a teacher.
    """
    quiet_transformers()
    if (problem := probe_rewards(config.reward, config.rollout)) is not None:
        raise RewardError(problem)
    episode = check_own_functions(config)
    tokenizer, stops, limits = read_models(config)
    found = Inputs(tokenizer, stops, limits, None, None, clock=hold_clock(tokenizer), episode=episode)
    notes = [f"model-written code runs in a sandbox: {name}" for name in sandboxes(config)]
    notes += [*template_notes(config, tokenizer), *id_notes(limits), *adapter_notes(config)]
    if config.data.generate is not None:
        return dataclasses.replace(found, notes=tuple(notes))
    held_out, most = data_sets(config, "data.validation"), config.data.stream_rows
    if most is not None:
        train, max_rows = found.stream(config, notes.append), config.validation.max_prompts or most
    else:
        train = found.encode(config, data_sets(config, "data.train"), notes.append, max_rows)
    validation = found.encode(config, held_out, notes.append, max_rows) if held_out else None
    check_sources(config, train, validation)
    notes += repetitions(config, train, validation)
    return dataclasses.replace(found, train=train, validation=validation, notes=tuple(notes))


def sandboxes(config: RunConfig) -> Iterator[str]:
    """Yield the sandbox of each reward or tool that runs programs, once it has been tried.

    A function of the user's that calls `open_sandbox()` does so in processes of its own, and gets the same sandbox.

    Raises:
        SandboxError: there is none for a reward or a tool that ships; a function of the user's may do without.
    """
    for one in (*config.reward.all_functions, *config.rollout.tools):
        if one.function in ("code", "python"):
            yield open_sandbox(one.parameters.get("url"), one.parameters.get("key")).name
        elif opens_sandbox(one.function):
            try:
                yield f"{open_sandbox().name} (open_sandbox() of {one.function})"
            except SandboxError as error:
                yield f"none, {one.function} cannot open one: {error}"


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """What a run trains with: its inputs, and the model and data that it made for itself."""

    model_path: str
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]
    train: Training
    validation: EncodedPrompts | EncodedRows | None
    episode: Episode | None = None

    def token_text(self, token: int) -> str:
        """Return the text of a token; of a special one its name."""
        return str(self.tokenizer.decode([token]))

    def counts(self) -> dict[str, float]:
        """Return how many examples there are, and how many of them were too long; nothing of a stream, read later."""
        if isinstance(self.train, StreamedPrompts | StreamedRows):
            return {}
        sets = [encoded for encoded in (self.train, self.validation) if encoded is not None]
        bad = sum(len(encoded.bad) for encoded in sets if isinstance(encoded, EncodedRows))
        return {
            **self.train.counts(),
            "data/num_dropped": bad + sum(len(encoded.dropped) for encoded in sets),
            "data/num_truncated": sum(len(encoded.truncated) for encoded in sets),
        }


def prepare(config: RunConfig, folder: RunFolder, found: Inputs, say: Callable[[str], None]) -> Material:
    """Make the model and the data that a config wants made, and add them to what was found.

    Args:
        config: of the run.
        folder: receives what is made.
        found: the result of `read_inputs`.
        say: called with a line about prompts that were left out or cut, or that occur twice.

    Raises:
        CheckpointError: model or data that the run made for itself were damaged since.
        DataError: prompts that are made are too long.
        DiskError: the disk is full or not writable.
    """
    quiet_transformers()
    train, validation, notes = found.train, found.validation, list(found.notes)
    if config.data.generate is not None:
        train, validation = (found.encode(config, [path], notes.append) for path in made_data(config, folder))
        notes += repetitions(config, train, validation)
    assert train is not None, "the config was checked: data.train or data.generate"
    if isinstance(train, StreamedPrompts | StreamedRows):
        train.tell = lambda encoded: say_fates(encoded, found.most_tokens(config), say)
    for line in notes:
        say(line)
    model_path = config.model.path or str(made_model(config, folder))
    return Material(model_path, found.tokenizer, found.stop_tokens, train, validation, found.episode)


def _functions_here(config: RunConfig) -> Iterator[str]:
    """Yield a note on each reward function from Python that cannot be sent to another process."""
    for spec in config.reward.named_functions.values():
        if spec in GIVEN and GIVEN[spec].code is None:
            yield (
                f"the reward function {spec.removeprefix('@')} runs on a thread of the driver, where a call "
                f"that hangs goes on after its deadline: it cannot be sent to a process ({GIVEN[spec].why_here})"
            )


DRY_RUN_ROWS = 20_000
"""Prompts of a data set that a dry run reads, so that it takes seconds."""


def examine(config: RunConfig) -> Inputs:
    """Check everything that a run begins with, before it has a folder or a process.

    Raises:
        ConfigError: the run does not fit on this machine.
        DataError: a data set has bad rows, or prompts that do not fit.
        ModelError: a model folder or a tokenizer cannot be used.
        RewardError: the reward function cannot be loaded, or gives no score for the first row's right answer.
    """
    notes = [*check_machine(config, make_plan(config)), *_functions_here(config)]
    check_weights(config)
    found = read_inputs(config)
    _ask_reward(config, found)
    return dataclasses.replace(found, notes=(*notes, *found.notes))


def examine_dry(config: RunConfig) -> tuple[str, ...]:
    """Do the same as `examine`, but read only the beginning of the data; return lines on what was read, and notes.

    Raises:
        ConfigError, DataError, ModelError, RewardError: as `examine`.
    """
    check_weights(config)
    found = read_inputs(config, max_rows=DRY_RUN_ROWS)
    _ask_reward(config, found)
    lines = [_described("train", found.train, config), _described("validation", found.validation, config)]
    if config.data.generate is not None:
        lines = [f"prompts        {config.data.generate.num_train_prompts:,}, made when the run starts"]
    epochs, train = config.trainer.num_epochs, found.train
    if epochs is not None and isinstance(train, EncodedPrompts | EncodedRows) and not train.is_part:
        steps = found.settled(config).trainer.num_steps
        lines.append(f"steps          {steps:,}, of {config.num_examples:,} examples (trainer.num_epochs={epochs:g})")
    if functions := config.reward.all_functions:
        lines.append(f"reward         {', '.join(one.function for one in functions)}, which could be imported")
    for section, own in config.own_functions.items():
        lines.append(f"{section:13}  {own.function}, which keeps to every rule")
    if (episode := config.rollout.own_episode) is not None:
        where = "is imported in its processes" if is_agent(episode) or is_blocking(episode) else "could be imported"
        lines.append(f"episode        {episode}, which {where}")
    if tools := config.rollout.tools:
        lines.append(f"tools          {', '.join(one.function for one in tools)}")
    return (*filter(None, lines), *_first_row(found), *found.notes)


def _ask_reward(config: RunConfig, found: Inputs) -> None:
    """Call the reward function once, with the first row; data that a run makes for itself is not there yet."""
    if config.reward.all_functions and isinstance(found.train, EncodedPrompts | StreamedPrompts):
        ask_once(config, found.train[0][1], found.tokenizer)


_HALF_TEXT, _HALF_TOKENS = 300, 8


def _first_row(found: Inputs) -> Iterator[str]:
    """Yield the first row that is trained on, as the model reads it: its text, its tokens, and which are trained."""
    if found.train is None:
        return
    if isinstance(found.train, EncodedPrompts | StreamedPrompts):
        tokens, example = found.train[0]
        what, name, ids, trained = "prompt", example.name, list(tokens), None
    else:
        what, first = "row", found.train[0]
        name, ids = first.name, first.rows[0][0].tolist()
        trained = [token for token, is_trained in zip(ids, first.rows[0][1], strict=True) if is_trained]
    yield f"{f'first {what}':13}  {name}, {len(ids):,} tokens: {_shortened(str(found.tokenizer.decode(list(ids))))!r}"
    tokens = [f"{token} {str(found.tokenizer.decode([token]))!r}" for token in ids]
    shown = [*tokens[:_HALF_TOKENS], f"... {len(tokens) - 2 * _HALF_TOKENS:,} more ...", *tokens[-_HALF_TOKENS:]]
    yield f"{'its tokens':13}  {'  '.join(shown if len(tokens) > 2 * _HALF_TOKENS else tokens)}"
    if trained is not None:
        yield f"{'trained':13}  {len(trained):,} tokens: {_shortened(str(found.tokenizer.decode(trained)))!r}"


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * _HALF_TEXT else f"{text[:_HALF_TEXT]} ... {text[-_HALF_TEXT:]}"


def _described(name: str, data: Training | None, config: RunConfig) -> str:
    if data is None:
        return ""
    if isinstance(data, StreamedPrompts | StreamedRows):
        return f"{name:13}  read as the run goes, at most {config.data.stream_rows:,} rows at once"
    what, key = ("examples", "data.max_row_tokens") if config.trains_on_files else ("prompts", "data.max_prompt_tokens")
    whole = f"the first {len(data):,} {what} alone were read" if data.is_part else f"{len(data):,} {what}"
    most = config.data.max_row_tokens if config.trains_on_files else config.data.max_prompt_tokens
    return f"{name:13}  {whole}, the longest of {data.max_tokens:,} tokens ({key}={most})"
