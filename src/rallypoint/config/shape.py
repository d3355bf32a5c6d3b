"""The sizes of a decoder, as far as they are known before it is loaded: from the config, or from config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.config.recipes import RoleName
from rallypoint.config.sections.material import CreateModelConfig, LoRAConfig
from rallypoint.config.tree import RunConfig
from rallypoint.families import FAMILIES
from rallypoint.families.kinds import Kind, Layers, Mixer, read_layers, small_model

_DIGITS_VOCABULARY = 20
_MAX_HEADER_BYTES = 100_000_000

_PUBLISHED = Path(__file__).parent / "models"
"""config.json of models that shipped recipes name, so that their plans are known before anything is downloaded."""

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
"""Fields of config.json that plain decoders have; without the last if all layers have experts."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that memory and work follow from: kinds of layers, embeddings and a head.

    What is said of a layer here holds for the one that has most of it; sums are over all layers.
    """

    hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    layers: tuple[Layers, ...]
    model_type: str = "llama"
    """The family, as in config.json."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Mixers and MLPs, each kind once."""
        return tuple(dict.fromkeys([*self.mixers, *(layers.mlp for layers in self.layers)]))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Mixers, each kind once."""
        return tuple(dict.fromkeys(layers.mixer for layers in self.layers))

    @property
    def head_dims(self) -> frozenset[int]:
        """Widths of heads whose keys and values are cached."""
        return frozenset[int]().union(*(mixer.head_dims for mixer in self.mixers))

    def _sum(self, of_kind: Callable[[Kind], int]) -> int:
        """Return a sum over the mixers and MLPs of all layers."""
        return sum(layers.count * (of_kind(layers.mixer) + of_kind(layers.mlp)) for layers in self.layers)

    @property
    def num_layers(self) -> int:
        """All layers."""
        return sum(layers.count for layers in self.layers)

    @property
    def num_uncut_parameters(self) -> int:
        """Weights that every rank of `tp` has whole, beside small ones."""
        return self._sum(lambda kind: kind.num_uncut_parameters)

    def num_idle(self, num_tokens: int) -> float:
        """Return how many weights a pass of so many tokens does not read: experts that none is sent to."""
        return sum(layers.count * layers.mlp.num_idle(num_tokens) for layers in self.layers)

    @property
    def inner_size(self) -> int:
        """Width that a token passes inside an MLP, or inside all of its experts; the mean over the layers."""
        return sum(layers.count * layers.mlp.width for layers in self.layers) // self.num_layers

    def shared(self, axis: str, tp: int = 1) -> dict[str, int]:
        """Return the parts that ranks of an axis share equally -> how many a rank of `tp` has; see `Kind.shared`."""
        return {what: num for kind in self.kinds for what, num in kind.shared(tp).get(axis, {}).items()}

    def of_ep_rank(self, ep: int) -> ModelShape:
        """Return the sizes of the weights that a rank of `ep` has."""
        layers = (dataclasses.replace(layers, mlp=layers.mlp.of_ep_rank(ep)) for layers in self.layers)
        return dataclasses.replace(self, layers=tuple(layers))

    def part(self, tp: int, ep: int | None) -> ModelShape:
        """Return the sizes of what a rank of `tp` computes, see `Kind.part`: its part of layers, and some tokens."""
        layers = (Layers(layers.count, layers.mixer.part(tp, ep), layers.mlp.part(tp, ep)) for layers in self.layers)
        return dataclasses.replace(self, vocab_size=-(-self.vocab_size // tp), layers=tuple(layers))

    @property
    def num_backbone_parameters(self) -> int:
        """Weights of the layers and norms."""
        norms = self.hidden_size * (2 * self.num_layers + 1)
        return self._sum(lambda kind: kind.num_parameters) + norms

    @property
    def most_of_a_weight(self) -> int:
        """Numbers of the largest weight, at most: the embedding, or what an MLP has."""
        return max(self.vocab_size * self.hidden_size, *(kind.num_parameters for kind in self.kinds))

    def rounded_up(self, num_ranks: int) -> float:
        """Return how much larger matrices are in blocks of powers of two, if ranks have equal parts of each."""
        matrices = [(1 if self.tie_embeddings else 2, self.vocab_size * self.hidden_size)]
        for layers in self.layers:
            for kind in (layers.mixer, layers.mlp):
                sizes = map(math.prod, (*kind.products.values(), *kind.stacks.values()))
                matrices += ((layers.count, size) for size in sizes)
        parts = [(num, -(-size // num_ranks)) for num, size in matrices]
        return sum(num << (size - 1).bit_length() for num, size in parts) / sum(num * size for num, size in parts)

    @property
    def num_parameters(self) -> int:
        """All weights of the causal language model."""
        embeddings = self.vocab_size * self.hidden_size
        return self.num_backbone_parameters + embeddings * (1 if self.tie_embeddings else 2)

    @property
    def num_critic_parameters(self) -> int:
        """Weights of a token classifier with one label on the same backbone."""
        return self.num_backbone_parameters + self.vocab_size * self.hidden_size + self.hidden_size + 1

    @property
    def num_reward_parameters(self) -> int:
        """Weights of a sequence classifier with one label, which has no bias."""
        return self.num_critic_parameters - 1

    @property
    def expert_matrices(self) -> Sequence[str]:
        """Ends of the names of matrices of experts, which adapters may stand beside."""
        family = FAMILIES.get(self.model_type)
        names = dict.fromkeys(name for kind in self.kinds for name in kind.stacks)
        return [f"{family.experts}.{name}" for name in names] if family and family.experts else []

    def has_experts(self, target: str) -> bool:
        """Return whether a target matches matrices of experts, of whatever layer."""
        return any(f".{name}".endswith(f".{target}") or target.endswith(f".{name}") for name in self.expert_matrices)

    def num_adapter_parameters(self, lora: LoRAConfig) -> int:
        """Weights of A and B of the adapted products and experts; of an adapter in a folder, at most what it has."""
        stored, lora = _num_stored(lora), known_adapter(lora)

        def is_adapted(name: str, targets: Sequence[str]) -> bool:
            return any(target == name or target.endswith(f".{name}") for target in targets)

        def adapted(kind: Kind) -> int:
            everything = "all-linear" in lora.target_modules
            of_products = (
                sum(sizes)
                for name, sizes in kind.products.items()
                if everything or is_adapted(name, lora.target_modules)
            )
            of_stacks = (
                num * (inputs + outputs)
                for name, (num, inputs, outputs) in kind.stacks.items()
                if is_adapted(name, lora.target_parameters)
            )
            return sum(of_products) + sum(of_stacks)

        in_all_layers = lora.rank * self._sum(adapted)
        return in_all_layers if stored is None else min(stored, in_all_layers)

    @property
    def token_cost(self) -> int:
        """Multiplications for a token in all layers, whatever its row; of experts those that it is sent to."""
        return self._sum(lambda kind: kind.token_cost)

    @property
    def attention_cost(self) -> float:
        """Work of one pair of tokens in all layers, where the products with weights of one token are 1."""
        return sum(layers.count * layers.mixer.pair_cost for layers in self.layers) / self.token_cost

    def cached_bytes(self, size: int, *, by_server: bool = False) -> int:
        """Return what the cache keeps of a token in all layers; `size` is the bytes of a number of the model."""
        mixers = ((layers.count, layers.mixer) for layers in self.layers)
        return sum(num * (one.served_bytes(size) if by_server else one.cached_bytes(size)) for num, one in mixers)

    def state_bytes(self, size: int) -> int:
        """Return what a sequence remembers in all layers, however long it is."""
        return sum(layers.count * layers.mixer.state_bytes(size) for layers in self.layers)

    def kept_bytes(self, size: int) -> int:
        """Return what a layer keeps of a token for the backward pass, outside rows.

        Norms keep their input, a float32 for each, and what they return; the MLP four tensors.
        """
        norms = 2 * (2 * self.hidden_size * size + 4) + max(mixer.norm_bytes(size) for mixer in self.mixers)
        return norms + max(mixer.kept_bytes(size) for mixer in self.mixers) + 4 * size * self.inner_size

    def attended_bytes(self, size: int, num_scores: int) -> int:
        """Return what a layer keeps of a token of a row; see `Mixer.attended_bytes`."""
        return max(mixer.attended_bytes(size, num_scores) for mixer in self.mixers)

    def live_bytes(self, size: int) -> int:
        """Return the most that exists of a token in an MLP that keeps nothing, and of its residual stream and angles.

        The MLP has what goes in, gate, up, silu of the gate, and its product with up.
        """
        return size * (2 * self.hidden_size + 4 * self.inner_size) + self._position_bytes(size)

    def attending_bytes(self, size: int) -> int:
        """Return what exists of a token while its mixer runs and keeps nothing, outside the rows.

        Residual stream and what its norm returns; what the mixer has of it; its position.
        """
        of_mixer = max(mixer.attending_bytes(size) for mixer in self.mixers)
        return 2 * size * self.hidden_size + of_mixer + self._position_bytes(size)

    def folded_bytes(self, size: int, num_scores: int, num_block_scores: int) -> int:
        """Return the most that exists of a token of a row meanwhile; see `Mixer.folded_bytes`."""
        return max(mixer.folded_bytes(size, num_scores, num_block_scores) for mixer in self.mixers)

    def borrowed_bytes(self, size: int) -> int:
        """Return what a layer needs of a token of another rank: its key and its value."""
        return max(mixer.cached_bytes(size) for mixer in self.mixers)

    def _position_bytes(self, size: int) -> int:
        return max(mixer.position_bytes(size) for mixer in self.mixers)


def shape_of(config: RunConfig) -> ModelShape | None:
    """Return the model's shape from the config or from its folder; None when that cannot be known yet."""
    made = config.model.create
    if made is not None:
        return _created_shape(made)
    return read_shape(config.model.path) if config.model.path is not None else None


def role_shapes(config: RunConfig, role: RoleName) -> tuple[ModelShape | None, ...]:
    """Return the shapes of a role's models; the critic's is taken to be the actor's."""
    if role in ("teacher", "reward"):
        return tuple(map(read_shape, config.own_models[role]))
    return (shape_of(config),)


def read_shape(path: str | Path) -> ModelShape | None:
    """Read a shape from a folder's config.json, or a published model's by its name on the hub; None if it has none.

    >>> shape = read_shape("Qwen/Qwen3-0.6B")
    >>> shape.num_parameters
    596049920
    """
    return _read(Path(path).expanduser() / "config.json") or _read(_PUBLISHED / f"{str(path).replace('/', '--')}.json")


def _read(file: Path) -> ModelShape | None:
    try:
        if not file.is_file():  # a pipe would be waited for
            return None
        return parse_shape(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def parse_shape(values: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape that the fields of a config.json tell of; None when it is not that of a plain decoder."""
    try:
        values = values.get("text_config", values)  # of a model that sees, too
        model_type = str(values.get("model_type", ""))
        family = FAMILIES.get(model_type)
        if not all(int(values[name]) >= 1 for name in SIZES if name in values or name != "intermediate_size"):
            return None
        return ModelShape(
            hidden_size=int(values["hidden_size"]),
            vocab_size=int(values["vocab_size"]),
            tie_embeddings=bool(values.get("tie_word_embeddings", family is not None and family.ties_embeddings)),
            layers=read_layers(values, family),
            model_type=model_type,
        )
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return None


def known_adapter(lora: LoRAConfig) -> LoRAConfig:
    """Return a config with the rank and the experts that the folder of its adapter says, if there is one."""
    if lora.path is None:
        return lora
    file = Path(lora.path).expanduser() / "adapter_config.json"
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        experts = tuple(map(str, said.get("target_parameters") or ()))
        return lora.model_copy(update={"rank": int(said["r"]), "target_parameters": experts})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return lora


def _num_stored(lora: LoRAConfig) -> int | None:
    """Return how many numbers the adapter in a folder has, by its file; None if there is none that can be read."""
    if lora.path is None:
        return None
    try:
        with (Path(lora.path).expanduser() / "adapter_model.safetensors").open("rb") as file:
            header = json.loads(file.read(min(_MAX_HEADER_BYTES, int.from_bytes(file.read(8), "little"))))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _created_shape(made: CreateModelConfig) -> ModelShape | None:
    sizes = {
        "hidden_size": made.hidden_size,
        "num_hidden_layers": made.num_layers,
        "num_attention_heads": made.num_heads,
        "num_key_value_heads": made.num_key_value_heads,
        "intermediate_size": made.intermediate_size,
        "vocab_size": _DIGITS_VOCABULARY,
    }
    fields = small_model(made.architecture, sizes)
    return parse_shape(fields | {"model_type": made.architecture, "tie_word_embeddings": False})


def misfit_of(num_ranks: int, sizes: Mapping[str, int]) -> str | None:
    """Return why some ranks cannot share a model, and how many could; None when they can.

    >>> misfit_of(3, {"attention heads": 18, "key/value heads": 8})
    '3 does not divide 8 key/value heads; choose 1 or 2'

    Args:
        num_ranks: ranks that share the model.
        sizes: parts that they share equally -> how many there are.
    """
    left_over = [f"{size} {what}" for what, size in sizes.items() if size % num_ranks]
    if not left_over:
        return None
    common = math.gcd(*sizes.values())
    choices = [str(size) for size in range(1, common + 1) if common % size == 0]
    return f"{num_ranks} does not divide {_listed(left_over, 'and')}; choose {_listed(choices, 'or')}"


def _listed(items: Sequence[str], word: str) -> str:
    return f" {word} ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
