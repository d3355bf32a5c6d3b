"""What of the driver's environment goes with it to the workers of a cluster that somebody else started.

Workers of a cluster of our own inherit everything. On another one they have the environment of `ray start` on their
node, and what a user sets for `rally train` would be without effect there, silently. So what configures the libraries
that workers use goes along, and wins over what the node has; everything else stays here.
"""

from __future__ import annotations

from collections.abc import Mapping

PREFIXES = (
    "NCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "GLOO_", "UCX_", "FI_", "CUDA_", "CUBLAS_", "HSA_", "RCCL_",
    "TRITON_", "VLLM_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "KMP_", "RALLYPOINT_",
)  # fmt: skip
"""Of the names that go along."""

OF_THE_NODE = frozenset(
    {
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_HOSTID",
        "OMP_NUM_THREADS",
        "RALLYPOINT_CLUSTER",
        "TORCH_EXTENSIONS_DIR",
        "VLLM_API_KEY",
        "VLLM_HOST_IP",
    }
)
"""Names with such a prefix that stay: they say where something is on one machine, or what a process was given there."""


def luggage(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go along.

    >>> luggage({"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "AWS_SECRET_ACCESS_KEY": "..."})
    {'NCCL_DEBUG': 'INFO'}
    """
    return {name: value for name, value in environment.items() if name.startswith(PREFIXES) and name not in OF_THE_NODE}
