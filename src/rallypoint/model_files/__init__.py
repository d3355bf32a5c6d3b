"""Model folders of Hugging Face and PEFT: read, checked and written, by every rank for its own part.

Must not know: how a model computes, roles, runs.
"""

from rallypoint.model_files.adapters import (
    adapters_of,
    fresh,
    is_adapter,
    merge_adapters,
    open_adapter,
    read_adapter,
    save_adapter,
)
from rallypoint.model_files.create import create_model
from rallypoint.model_files.load import (
    DTYPES,
    load_critic,
    load_new_reward_model,
    load_policy,
    load_reward_model,
    outline_policy,
    reload,
)
from rallypoint.model_files.load_checks import is_finite
from rallypoint.model_files.reader import TensorFiles, reads_of
from rallypoint.model_files.tensor_names import own_names
from rallypoint.model_files.writer import Writing, save_model, save_tensors

__all__ = [
    "DTYPES",
    "TensorFiles",
    "Writing",
    "adapters_of",
    "create_model",
    "fresh",
    "is_adapter",
    "is_finite",
    "load_critic",
    "load_new_reward_model",
    "load_policy",
    "load_reward_model",
    "merge_adapters",
    "open_adapter",
    "outline_policy",
    "own_names",
    "read_adapter",
    "reads_of",
    "reload",
    "save_adapter",
    "save_model",
    "save_tensors",
]
