"""What a process on a CPU takes beside the tensors of its passes; measured (benchmarks/README.md, "Memory").

Owns: these figures, which the plan of memory adds. Must not know: configs, models.
"""

_HEAP, _HEAP_OF_CHECKPOINTS = 1.4, 2.0
"""Heap of the C library over the size of a pass's tensors. It aligns tensors in a way that leaves holes, the more of
them the more often layers are computed. Tensors in pages of their own would avoid that in 1.3 to 1.7 times the time."""
_LIBRARY_BYTES = 8 * 2**20
"""Room that MKL works in, code, Python's objects, once a process has trained: 6.5 to 7 MiB from 0.08M to 10M."""
_DECODER_BYTES = 15 * 2**20
"""TorchScript's, once it has compiled the decoder; fitted to the demo."""
_KERNEL_BYTES, _ADAPTER_KERNEL_BYTES = 85 * 2**20, 25 * 2**20
"""Kernels that oneDNN compiles for bfloat16, one for every shape of a product; and for the narrow ones of adapters."""


def on_heap(num_bytes: int, *, checkpointed: bool, decodes: bool, in_half: bool, has_adapters: bool) -> int:
    """Return what a process takes for a pass.

    Args:
        num_bytes: tensors of the pass.
        checkpointed: whether layers are computed twice.
        decodes: whether our own engine samples in this process.
        in_half: whether products are in bfloat16.
        has_adapters: whether the model has adapters.
    """
    kernels = _LIBRARY_BYTES + _DECODER_BYTES * decodes
    kernels += (_KERNEL_BYTES + _ADAPTER_KERNEL_BYTES * has_adapters) * in_half
    return round(num_bytes * (_HEAP_OF_CHECKPOINTS if checkpointed else _HEAP)) + kernels
