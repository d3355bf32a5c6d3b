"""Loading of models: causal language models, critics as token classifiers, reward models as sequence classifiers.

Owns: which class is built, and errors about folders that do not fit. Must not know: who trains the model. A model is
built without memory, cut for this rank and only then filled, rectangle by rectangle, so that no rank ever holds more
than its own part and a few buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

from rallypoint.config import LoRAConfig
from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES
from rallypoint.model_files.adapters import adapters_of, fill_adapters
from rallypoint.model_files.load_checks import check_agreement, check_finite, fit, make_sketch
from rallypoint.model_files.locate import explained, open_weights, read_config, read_generation_config
from rallypoint.model_files.mxfp4 import read_packed
from rallypoint.model_files.reader import TensorFiles
from rallypoint.models.head import lm_head, value_head
from rallypoint.models.lora import Adapters
from rallypoint.models.shard import ModelShard, allocate, build
from rallypoint.parallel import DeviceMesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

CPU = torch.device("cpu")


class _Loader:
    """Loads models of one kind."""

    def __call__(
        self,
        path: str,
        *,
        dtype: str,
        mesh: DeviceMesh | None = None,
        device: torch.device = CPU,
        trust_remote_code: bool = False,
        lora: LoRAConfig | None = None,
        seed: int = 0,
        frozen: bool = False,
    ) -> ModelShard:
        """Load this rank's part of a model, for packed rows.

        Args:
            path: a Hugging Face folder, or the name of a repository on the hub.
            dtype: "float32", "bfloat16" or "float64".
            mesh: the ranks that hold the model together; None for one rank.
            device: of its weights.
            trust_remote_code: whether Python code in the folder may run.
            lora: adapters to add, so that only they and `trained_whole` are trained.
            seed: of new adapters.
            frozen: whether it is never trained, so that shards in half precision need no float32 masters.

        Raises:
            ModelError: the folder is missing, incomplete, or of a kind that cannot be trained here.
        """
        mesh, config = mesh or DeviceMesh.solo(), self._config(path, trust_remote_code)
        how: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
        adapters = None if lora is None else adapters_of(lora, whole=self.trained_whole)
        if mesh.passes.size > 1:
            self._check_sketch(path, config, DTYPES[dtype], device, trust_remote_code)
        with explained(path, config):
            shard = build(config, self.factory, mesh=mesh, adapters=adapters, frozen=frozen, **how)
        head = self._head(path, shard.model)
        _fill(path, shard, device, *self.differences(config))
        if adapters is not None:
            fill_adapters(shard, adapters, seed=seed)
        read_generation_config(path, shard.model)
        check_finite(path, shard.tensors(), mesh.tp)
        if mesh.passes.size == 1:
            check_agreement(path, shard.model, head)
        return shard

    def check(self, path: str, *, trust_remote_code: bool = False, lora: LoRAConfig | None = None) -> None:
        """Raise the errors of loading that config.json and the headers of the files show.

        Raises:
            ModelError: the folder is missing, incomplete, or of a kind that cannot be trained here, or adapters do not
                fit it.
        """
        config = self._config(path, trust_remote_code)
        adapters = None if lora is None else adapters_of(lora, whole=self.trained_whole)
        shard = _built(path, config, self.factory, "float32", trust_remote_code, adapters)
        self._head(path, shard.model)
        may_lack, may_exceed = self.differences(config)
        with open_weights(path) as files:
            fit(path, shard, files, may_lack=may_lack, may_exceed=may_exceed)

    def _config(self, path: str, trust_remote_code: bool) -> PreTrainedConfig:
        """Read the config of a folder, and refuse one that cannot be used."""
        config = read_config(path, trust_remote_code, **self.config_changes)
        self.check_config(path, config)
        _check_depth(path, config)
        return config

    def _check_sketch(
        self, path: str, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
    ) -> None:
        """Run `check_agreement` on a small model of the same kind, before the large one is allocated."""
        with explained(path, config):
            sketch = make_sketch(config, self.factory, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        check_agreement(path, sketch.model, self._head(path, sketch.model))

    def _head(self, path: str, model: PreTrainedModel) -> nn.Module:
        """Return the output layer of a model that was built; refuse one that cannot be used."""
        head = self.head(path, model)
        _check_attention(path, model)
        return head

    factory: ClassVar[Any]
    """Auto class of transformers for this kind."""
    config_changes: ClassVar[Mapping[str, Any]] = {}
    """Changes to the config of the folder."""
    trained_whole: ClassVar[tuple[str, ...]] = ()
    """Names of modules of which all weights are trained, in addition to new adapters."""
    headed: ClassVar[str] = ""
    """Ending of the classes whose files have the head; those of others lack it, and it becomes zero."""
    remedy: ClassVar[str] = ""
    """What to do where transformers' model has no head for values."""

    def check_config(self, path: str, config: PreTrainedConfig) -> None:
        """Refuse a folder of another kind."""

    def head(self, path: str, model: PreTrainedModel) -> nn.Module:
        """Return the output layer of the model; refuse a model without one."""
        if "score" not in dict(model.named_children()):
            raise ModelError(
                f"{path}: {type(model).__name__} has no `score` head, where values come from; {self.remedy}"
            )
        return value_head(model)

    def differences(self, config: PreTrainedConfig) -> tuple[Sequence[str], Sequence[str]]:
        """Return prefixes of weights that the files may lack, and patterns of tensors to ignore; see `fit`."""
        return ((), ()) if _architecture(config).endswith(self.headed) else (("score.",), (r"^lm_head\.",))


class _PolicyLoader(_Loader):
    """Loads causal language models."""

    factory = AutoModelForCausalLM

    def check_config(self, path: str, config: PreTrainedConfig) -> None:
        if _architecture(config).endswith("Classification"):
            raise ModelError(
                f"{path}: holds a critic or reward model ({_architecture(config)}), expected a language model"
            )

    def head(self, path: str, model: PreTrainedModel) -> nn.Module:
        if model.get_output_embeddings() is None:
            raise ModelError(
                f"{path}: {type(model).__name__} has no output embeddings; expected a causal language model"
            )
        return lm_head(model)


class TokenClassifiers:
    """A factory of token classifiers for every config that transformers has a backbone for.

    Where transformers has no token classifier, its generic one is put on the family's backbone. It is saved as any
    other model; opening it needs this class, until transformers has one of that name.
    """

    @staticmethod
    def from_config(config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
        """Return a model, as transformers' factories do.

        Raises:
            ValueError: transformers knows no model of this config.
        """
        has_own_code = "AutoModelForTokenClassification" in (getattr(config, "auto_map", None) or {})
        is_known = type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        if has_own_code or is_known or type(config) not in MODEL_MAPPING:
            return AutoModelForTokenClassification.from_config(config, trust_remote_code=trust_remote_code, **options)
        return _classifier_on(MODEL_MAPPING[type(config)])._from_config(config, **options)


@functools.cache
def _classifier_on(backbone: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class, made of the generic classifier and the family's base class, as transformers does."""
    family = next(base for base in backbone.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = f"{backbone.__name__.removesuffix('Model')}ForTokenClassification"
    return type(name, (GenericForTokenClassification, family), {"config_class": backbone.config_class})


class _CriticLoader(_Loader):
    """Loads token classifiers with one label, from the folder of a critic or of any model of the family.

    A folder without such a head gets one of zeros, so that the first values are zero.
    """

    factory = TokenClassifiers
    config_changes: ClassVar[Mapping[str, Any]] = {"num_labels": 1}
    trained_whole = ("score",)
    headed = "ForTokenClassification"
    remedy = "set critic.path to a model of another type with the same tokenizer, or recipe=grpo, which has no critic"


class _RewardLoader(_Loader):
    """Loads sequence classifiers with one label, as reward models are published; the files must have the head."""

    factory = AutoModelForSequenceClassification
    remedy = "set reward.path to a model of another type, or use a reward.function"

    def check_config(self, path: str, config: PreTrainedConfig) -> None:
        """Refuse models without a score, or with several."""
        kind = _architecture(config)
        if kind and not kind.endswith("ForSequenceClassification"):
            raise ModelError(
                f"{path}: holds a {kind}, expected a reward model: a sequence classifier with one label, as "
                "AutoModelForSequenceClassification with num_labels=1 saves it"
            )
        if config.num_labels != 1:
            raise ModelError(
                f"{path}: a classifier with {config.num_labels} labels, expected a reward model, which has one: its "
                "score; train or download one with num_labels=1"
            )


class _NewRewardLoader(_RewardLoader):
    """Loads reward models that are to be trained, also from the folder of a language model: its head is then zero."""

    config_changes: ClassVar[Mapping[str, Any]] = {"num_labels": 1}
    trained_whole = ("score",)
    headed = "ForSequenceClassification"

    def check_config(self, path: str, config: PreTrainedConfig) -> None:
        """Refuse classifiers of another kind."""
        if (kind := _architecture(config)).endswith("Classification"):
            super().check_config(path, config)
        elif not kind.endswith("ForCausalLM"):
            raise ModelError(f"{path}: holds a {kind or 'model of no known kind'}, expected a language or reward model")


load_policy = _PolicyLoader()
"""Load this rank's part of a causal language model."""
load_critic = _CriticLoader()
"""Load this rank's part of a token classifier with one label; a folder without such a head gets a zero one."""
load_reward_model = _RewardLoader()
"""Load this rank's part of a sequence classifier with one label."""
load_new_reward_model = _NewRewardLoader()
"""Load this rank's part of a sequence classifier with one label; a language model gets a zero head."""


def outline_policy(path: str, *, dtype: str, trust_remote_code: bool = False) -> ModelShard:
    """Return the causal language model of a folder without its weights, on the meta device.

    Raises:
        ModelError: the folder is missing or incomplete.
    """
    config = read_config(path, trust_remote_code)
    _check_depth(path, config)
    return _built(path, config, AutoModelForCausalLM, dtype, trust_remote_code)


def _built(
    path: str,
    config: PreTrainedConfig,
    factory: Any,
    dtype: str,
    trust_remote_code: bool,
    adapters: Adapters | None = None,
) -> ModelShard:
    """Return a whole model without memory."""
    how: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
    with explained(path, config):
        return build(config, factory, mesh=DeviceMesh.solo(), adapters=adapters, **how)


def reload(path: str, shard: ModelShard) -> None:
    """Replace the weights of a model by those in a folder of the same shapes.

    Raises:
        ModelError: the folder holds another model.
    """
    with open_weights(path) as files:
        _read(path, shard, files)


def _architecture(config: PreTrainedConfig) -> str:
    """Return the class that the folder was saved from; empty if unknown."""
    return (config.architectures or [""])[0]


def _check_depth(path: str, config: PreTrainedConfig) -> None:
    """Refuse more layers than the files could fill, before time is spent building them."""
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    with open_weights(path) as files:
        if num_layers > len(files.entries):
            raise ModelError(
                f"{path}: config.json says num_hidden_layers={num_layers}, but the files hold {len(files.entries)} "
                "tensors in all; give the config.json and the safetensors files that were saved together"
            )


def _fill(
    path: str, shard: ModelShard, device: torch.device, may_lack: Sequence[str] = (), may_exceed: Sequence[str] = ()
) -> None:
    """Allocate a model and read its weights, after the headers of the files have been checked."""
    with open_weights(path) as files:
        fit(path, shard, files, may_lack=may_lack, may_exceed=may_exceed)
        with explained(path, shard.model.config):
            allocate(shard, device)
        _read(path, shard, files, may_lack, may_exceed)


def _read(
    path: str, shard: ModelShard, files: TensorFiles, may_lack: Sequence[str] = (), may_exceed: Sequence[str] = ()
) -> None:
    """Read the weights of a model; optional weights that the files lack become zero."""
    found = fit(path, shard, files, may_lack=may_lack, may_exceed=may_exceed)
    files.read(found.reads)
    read_packed(files, found.packed)
    for one, other in found.same:
        if not files.equal(one, other):
            raise ModelError(
                f"{path}: config.json says that {one} and {other} are one matrix, but they differ: set "
                "tie_word_embeddings to false there, or remove one of them"
            )
    tensors = shard.tensors()
    for name in found.lacking:
        tensors[name].zero_()


def _check_attention(path: str, model: PreTrainedModel) -> None:
    """Refuse models that packed attention would compute wrongly."""
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    family = FAMILIES.get(str(model.config.model_type))
    kinds -= {"linear_attention"} if family is not None and family.linear_attentions else set()
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{path}: layers of type {', '.join(sorted(unknown))} are not supported yet")
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    kinds = {entry.get("rope_type") for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    if kinds & {"dynamic", "longrope"}:
        raise ModelError(
            f"{path}: its rotary embedding depends on the longest row in the batch, which is not supported yet"
        )
    if family is None and not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{path}: {type(model).__name__} does not use transformers' attention registry")
