"""Model folders of Hugging Face and PEFT: read, checked and written, by every rank for its own part.

Must not know: how a model computes, roles, runs.
"""

from rallypoint.model_files.adapters import (
    adapters_of as adapters_of,
    fresh as fresh,
    is_adapter as is_adapter,
    merge_adapters as merge_adapters,
    open_adapter as open_adapter,
    read_adapter as read_adapter,
    save_adapter as save_adapter,
)
from rallypoint.model_files.create import create_model as create_model
from rallypoint.model_files.load import (
    DTYPES as DTYPES,
    load_critic as load_critic,
    load_new_reward_model as load_new_reward_model,
    load_policy as load_policy,
    load_reward_model as load_reward_model,
    outline_policy as outline_policy,
    reload as reload,
)
from rallypoint.model_files.load_checks import is_finite as is_finite
from rallypoint.model_files.reader import TensorFiles as TensorFiles, reads_of as reads_of
from rallypoint.model_files.tensor_names import own_names as own_names
from rallypoint.model_files.writer import Writing as Writing, save_model as save_model, save_tensors as save_tensors
