"""The material of a run: its model, its prompts, its reward."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag, model_serializer

from rallypoint.config.fields import Section, Texts, key, section
from rallypoint.config.sections.places import MeshConfig, PlacementConfig

Architecture = Literal[
    "llama", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "gpt_oss", "glm4_moe", "deepseek_v3"
]
OnTooLong = Literal["error", "drop", "truncate"]


class CreateModelConfig(Section):
    """A small model with random weights and a tokenizer for digits, made when the run starts."""

    architecture: Architecture = key("llama", help="Family, as in transformers.")
    hidden_size: int = key(64, at_least=8, at_most=1024, help="Width.")
    num_layers: int = key(2, at_least=1, at_most=32, help="Decoder layers.")
    num_heads: int = key(4, at_least=1, at_most=64, help="Attention heads.")
    num_key_value_heads: int = key(4, at_least=1, at_most=64, help="Key/value heads; must divide num_heads.")
    intermediate_size: int = key(
        256, at_least=8, at_most=8192, help="Width inside the MLP; a mixture has 8 experts of a quarter."
    )
    initializer_range: float = key(0.02, above=0, at_most=1, help="Standard deviation of the initial weights.")


class LoRAConfig(Section):
    """Low-rank updates of linear layers and experts (arXiv 2106.09685), in PEFT's format; all else is frozen."""

    rank: int = key(32, at_least=1, at_most=2**16, help="Rows of A and columns of B.")
    alpha: float = key(32.0, above=0, help="The update is scaled by alpha / rank.")
    rslora: bool = key(False, help="Scale by alpha / sqrt(rank) instead (arXiv 2312.03732).")
    target_modules: Texts = key(("all-linear",), help="Layers of the decoder, by the ends of their names.")
    target_parameters: Texts = key(
        (), hidden=True, help="Matrices of experts, by the ends of their names, such as mlp.experts.down_proj."
    )
    path: str | None = key(None, help="Adapter to start the actor from; its folder has the other keys.")


class TokenizerConfig(Section):
    """What is changed in the tokenizer of the model's folder, and saved with it: base models need that for chats."""

    chat_template: str | None = key(None, help="File of the chat template, in Jinja; null: the model's own.")
    eos_token: str | None = key(None, help="Token that ends a response, such as <|im_end|>; null: the model's own.")


class ModelConfig(Section):
    """The model to train: exactly one of path and create."""

    path: str | None = key(None, help="Hugging Face folder (or hub name) of a causal language model.")
    create: CreateModelConfig | None = section(None, help="Make a small random model instead of loading one.")
    dtype: Literal["float32", "bfloat16"] = key(
        "float32", automatic=True, help="Type of weights and computation; null: float32 on the CPU, elsewhere bfloat16."
    )
    trust_remote_code: bool = key(False, help="Run Python code that the model folder brings along.")
    tokenizer: TokenizerConfig | None = section(None, help="Change the tokenizer's chat template or end token.")
    lora: LoRAConfig | None = section(None, help="Train adapters of actor and critic instead of all weights.")


class GenerateDataConfig(Section):
    """A data set of digit tasks, made when the run starts."""

    task: Literal["sort", "sequence", "sum"] = key("sort", help="What is to be done with the digits.")
    num_digits: int = key(6, at_least=2, at_most=12, help="Length of an answer.")
    num_train_prompts: int = key(20_000, at_least=1, at_most=10**7, unit="prompts", help="Rows of train.parquet.")
    num_validation_prompts: int = key(
        512, at_least=1, at_most=10**7, unit="prompts", help="Rows of validation.parquet."
    )


class ColumnsConfig(Section):
    """What the columns are called in the files; null: as here."""

    prompt: str | None = key(None, help="Column of the prompt: text, or a list of messages.")
    ground_truth: str | None = key(None, help="Column of the right answer; that of prompt: its last message.")
    data_source: str | None = key(None, help="Column of the data source, by which a reward function may choose.")
    ability: str | None = key(None, help="Column of the ability.")
    extra_info: str | None = key(None, help="Column of an object for the reward function.")
    tools: str | None = key(None, help="Column of the tools that may be called, as function schemas.")
    messages: str | None = key(None, help="Column of a conversation to be trained on.")
    completion: str | None = key(None, help="Column of the answer to a prompt, to be trained on.")
    chosen: str | None = key(None, help="Column of the better answer of a pair.")
    rejected: str | None = key(None, help="Column of the worse one.")

    @property
    def named(self) -> dict[str, str]:
        """Our names of the columns that have others, with these."""
        return {name: str(column) for name, column in self if column is not None}


class DataSetConfig(Section):
    """A data set of several, or one of which a path does not say enough."""

    path: str
    weight: float | None = Field(default=None, gt=0, le=1e6)
    """Share of the prompts, relative to the other data sets; None: each prompt of it occurs once an epoch."""
    subset: str | None = None
    """Folder of its files inside path."""
    split: str | None = None
    columns: ColumnsConfig | None = None
    """Columns of this data set, in place of data.columns."""
    data_source: str | None = None
    """Source name for rows without one."""
    parameters: dict[str, Any] | None = None
    """Parameters of a generator, `reasoning_gym:NAME`: size, seed, and what its config has."""
    on_bad_row: Literal["error", "drop"] | None = None
    """What happens to conversations and pairs that cannot be used, such as an empty answer. None: error."""
    stream_rows: int | None = Field(default=None, ge=2)
    """Rows in memory at most: they are read as the run goes, and shuffled among half as many. None: all are."""

    @model_serializer
    def _short(self) -> dict[str, object]:
        """Leave out what is not set."""
        found: dict[str, object] = {name: value for name, value in self if value is not None}
        return found if self.columns is None else found | {"columns": self.columns.named}


def _listed(value: object) -> object:
    """Let one data set stand for a list of one."""
    return cast("object", value) if isinstance(value, list | tuple) else (value,)


def _kind(value: object) -> str:
    return "object" if isinstance(value, dict | DataSetConfig) else "text"


DataSets = Annotated[
    tuple[Annotated[Annotated[str, Tag("text")] | Annotated[DataSetConfig, Tag("object")], Discriminator(_kind)], ...],
    Strict(False),
    BeforeValidator(_listed),
]
"""One data set, or a list of them: each a path, or an object with keys."""


def path_of(dataset: str | DataSetConfig) -> str:
    """Return the path of a data set."""
    return dataset if isinstance(dataset, str) else dataset.path


def weight_of(dataset: str | DataSetConfig) -> float | None:
    """Return the share of a data set in a mixture; None if it has none."""
    return None if isinstance(dataset, str) else dataset.weight


class DataConfig(Section):
    """Rows of the data: exactly one of train and generate."""

    train: DataSets = key((), help="Files, folders, URLs, hub names, reasoning_gym:NAME; a mixture as {path, weight}.")
    validation: DataSets = key((), help="The same for validation; empty for none.")
    columns: ColumnsConfig | None = section(None, help="Names of the columns in the files; null: as here.")
    generate: GenerateDataConfig | None = section(None, help="Make a data set instead of reading one.")
    num_examples: int = key(
        64, at_least=1, at_most=2**20, unit="examples", help="Conversations or pairs of a step, where none are sampled."
    )
    max_row_tokens: int = key(
        2048, at_least=2, unit="tokens", help="Longest conversation, or prompt with an answer, chat template included."
    )
    max_prompt_tokens: int = key(512, at_least=1, unit="tokens", help="Longest prompt, chat template included.")
    on_too_long: OnTooLong = key(
        "error",
        help="What happens to longer ones: truncate cuts a prompt's beginning, or a row's end; both are counted.",
    )
    template: dict[str, Any] | None = key(
        None, help="Arguments of the chat template, such as {enable_thinking: false}; checkpoints have them, too."
    )
    shuffle: bool = key(True, help="A new order in every epoch, from the seed; false keeps the file's order.")

    @property
    def stream_rows(self) -> int | None:
        """Rows of the training data in memory at most; None if they are read at the start."""
        return sum(one.stream_rows or 0 for one in self.train if not isinstance(one, str)) or None


class OverlongConfig(Section):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): long responses lose a part of their score."""

    max_tokens: int | None = key(
        None, at_least=1, unit="tokens", help="Length that loses all of it; null: rollout.max_response_tokens."
    )
    buffer_tokens: int | None = key(
        None, at_least=1, unit="tokens", help="Tokens before that in which it grows; null: a fifth, as in the paper."
    )
    factor: float = key(1.0, above=0, help="The largest penalty, in the unit of the reward.")


class RewardFunctionConfig(Section):
    """One of several reward functions."""

    name: str = key(help="Name in its metrics, reward/NAME/mean and so on: letters, digits and `_`.")
    function: str = key(help="As reward.function.")
    weight: float = key(1.0, at_least=-1e6, at_most=1e6, help="The score is the sum of weight times score.")
    parameters: dict[str, Any] = key({}, help="As reward.parameters.")


class RewardModelConfig(Section):
    """One of several reward models."""

    name: str = key(help="Name in its metrics, reward/NAME/mean and so on: letters, digits and `_`.")
    path: str = key(help="As reward.path.")
    weight: float = key(1.0, at_least=-1e6, at_most=1e6, help="Weight of its score in the sum.")


_Functions = Annotated[tuple[RewardFunctionConfig, ...], Strict(False)]
_Models = Annotated[tuple[RewardModelConfig, ...], Strict(False)]


class RewardConfig(Section):
    """How rollouts are scored: by functions, by reward models, or by the weighed sum of them."""

    function: str | None = key(None, help="`file.py:compute_score`, or one that ships (docs/reward.md); null for none.")
    parameters: dict[str, Any] = key({}, help="Further arguments of the function, by name.")
    functions: _Functions = key(
        (), help="Several in place of one, such as [{name: right, function: math, weight: 0.9}]."
    )
    path: str | None = key(None, help="Hugging Face folder of a sequence classifier with one label; null for none.")
    models: _Models = key((), help="Several in place of path, such as [{name: safe, path: folder, weight: 0.5}].")
    timeout_s: float = key(60.0, above=0, unit="s", help="Deadline of one call of the function.")
    num_processes: int | None = key(
        None,
        at_least=1,
        at_most=1024,
        unit="processes",
        help="Processes that call the function; null: one a core (16 at most), to 128 while it mostly waits.",
    )
    max_calls: int | None = key(
        None, at_least=1, unit="calls", help="Calls after which a process is replaced, for functions that leak."
    )
    max_memory_gib: float | None = key(
        None, above=0, unit="GiB", help="Address space of such a process; beyond, memory has run out for it."
    )
    overlong: OverlongConfig | None = section(None, help="Penalty for long responses, in training only.")
    placement: PlacementConfig = section(PlacementConfig, help="Where the reward models run.")
    mesh: MeshConfig | None = section(None, help="How reward models' ranks divide models and rows; null: all axes 1.")

    @property
    def all_functions(self) -> tuple[RewardFunctionConfig, ...]:
        """The functions, whether there is one or several."""
        if self.function is None:
            return self.functions
        return (
            RewardFunctionConfig(name="function", function=self.function, parameters=self.parameters),
            *self.functions,
        )

    @property
    def named_functions(self) -> dict[str, str]:
        """The functions by the key that names each."""
        several = {f"reward.functions.{one.name}": one.function for one in self.functions}
        return several if self.function is None else {"reward.function": self.function} | several

    @property
    def all_models(self) -> tuple[RewardModelConfig, ...]:
        """The reward models, whether there is one, which is called `model`, or several."""
        if self.path is None:
            return self.models
        return (RewardModelConfig(name="model", path=self.path), *self.models)

    @property
    def named_models(self) -> dict[str, str]:
        """The folders of the reward models by the key that names each."""
        several = {f"reward.models.{one.name}": one.path for one in self.models}
        return several if self.path is None else {"reward.path": self.path} | several

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward by its name."""
        return {one.name: one.weight for one in (*self.all_functions, *self.all_models)}

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the names of several functions and models."""
        if self.function is not None and self.functions:
            yield (
                f"reward.function={self.function!r} beside reward.functions, which stand in its place: put it there, "
                "with a name and a weight"
            )
        if self.path is not None and self.models:
            yield (
                f"reward.path={self.path!r} beside reward.models, which stand in its place: put it there, with a name "
                "and a weight"
            )
        taken = {"function"} if self.function is not None else set[str]()
        for what, several in (("functions", self.functions), ("models", self.models)):
            for index, name in enumerate(one.name for one in several):
                where = f"reward.{what}[{index}].name={name!r}"
                if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or name == "model":
                    yield f"{where}: expected letters, digits and _, and not 'model', which is that of reward.path"
                elif name in taken:
                    yield f"{where} is also the name of another one; expected a different name"
                taken.add(name)
