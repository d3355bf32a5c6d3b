"""A device of torch that has no hardware: CPU memory and CPU kernels behind the walls that a GPU has.

`install()` makes `torch.device("pretend")` the accelerator of this process, for good: tests on it have
processes of their own (tests/pretend). What is computed has the bits of the CPU. What goes wrong on a GPU goes wrong
here, with an error:

- an operator that takes tensors of two devices (0-dim CPU tensors are taken, as on CUDA);
- an allocation beyond `limit`, which is `torch.OutOfMemoryError`;
- memory that one stream writes and another uses without having waited, or that is freed while another still uses it
  without `record_stream`;
- memory of a storage that was resized to nothing and back: it holds NaN, or numbers no less wrong;
- a copy to page-locked memory that is read before the device was waited for: it arrives at the synchronisation, and
  until then the memory holds the same wrong numbers;
- an operator for which CUDA has no deterministic kernel, where torch was asked for such kernels strictly.

`syncs` counts, by reason, how often the host waited for the device; `copies` counts, by direction, copies and bytes;
`kernels` counts operators, for attention the kernel that CUDA would have taken (`attention_kernel`), and gradients of
attention that CUDA would have added in any order.

How: tensors of the device are made by DLPack from CPU tensors, with another device type. Their memory is real, so
views, data pointers and storages are as on any device. A fallback gives every operator a CPU tensor of the same memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from pretend_memory import DEVICE, NAME, NUM_DEVICES, WRONG, Pretend, PretendEvent, PretendStream, index_of, unwrap
from torch import Tensor
from torch.nn import functional
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

_KEY = "PrivateUse1"
_CPU = torch.device("cpu")
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SYNCHRONISING = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::equal"}
"""Operators besides `item` whose result's size, or whose result, the host must know."""
_TAKES_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operators that take tensors of the CPU as indices, and copy them."""
_UNORDERED = {"cumsum", "kthvalue", "median", "nanmedian", "histc", "put_", "nll_loss2d_forward"}
"""Operators on floating-point numbers of which CUDA has no deterministic kernel, besides `bincount` with weights."""
_NEW = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::empty_like"}
_KEPT: list[torch.library.Library] = []
"""What is registered, for as long as the process lives."""


class _Module(_DummyBackendModule):
    """What `torch.get_device_module` returns."""

    def device_count(self) -> int:
        return NUM_DEVICES

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_device_name(self, device: Any = None) -> str:
        return f"Pretend H100 {index_of(device)}"


@functools.cache
def install() -> Pretend:
    """Make it the accelerator of this process, for good, and return it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    _register_operators()
    _stand_in()
    return DEVICE


def attention_kernel(query: Tensor, key: Tensor, *, has_mask: bool, is_causal: bool, enable_gqa: bool) -> str:
    """Return which kernel CUDA's `scaled_dot_product_attention` takes: cudnn, flash, efficient or math.

    From torch's own source (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), for capability 8.0 and later: flash
    takes half precision without a mask, grouped heads, heads up to 256, and is causal for squares only; the
    memory-efficient kernel takes float32 as well, and a mask, but no grouped heads, and heads of multiples of 16 bytes.
    From capability 9.0 on cuDNN's is the first choice in half precision, unless it is off or its order would matter.
    """
    is_half, is_grouped = query.dtype in (torch.float16, torch.bfloat16), enable_gqa and query.shape[1] != key.shape[1]
    is_square, size = query.shape[-2] == key.shape[-2], query.shape[-1]
    if is_half and not size % 8 and torch.backends.cuda.cudnn_sdp_enabled() and not is_strict():
        return "cudnn"
    if is_half and not has_mask and size <= 256 and (is_square or not is_causal):
        return "flash"
    is_aligned = size * query.itemsize % 16 == 0
    if (is_half or query.dtype == torch.float32) and not is_grouped and is_aligned:
        return "efficient"
    return "math"


def is_strict() -> bool:
    """Return whether torch was asked for deterministic kernels, and would raise where there is none."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _look_at_order(name: str, args: Sequence[Any]) -> None:
    """Do what CUDA does before an operator if it was asked for deterministic kernels.

    Raises:
        RuntimeError: there is no such kernel.
    """
    first, has_weights = args[0] if args else None, name == "bincount" and len(args) > 1 and args[1] is not None
    if not isinstance(first, Tensor) or not torch.are_deterministic_algorithms_enabled():
        return
    if is_strict() and (has_weights or (name in _UNORDERED and first.is_floating_point())):
        raise RuntimeError(
            f"{name} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation."
        )
    if name in ("index_put_", "_index_put_impl_") and not first.is_contiguous():
        DEVICE.kernels["whole copies to write in order"] += 2  # sorted indices want it contiguous: there and back


def _register_operators() -> None:
    """Say what computes: a fallback for all operators, and those that are about memory or devices."""
    library = torch.library.Library("aten", "IMPL")
    _KEPT.append(library)
    for name in ("as_strided", "view", "_reshape_alias", "set_.source_Storage_storage_offset"):
        library.impl(name, functools.partial(_by_cpu_kernel, _overload(name)), _KEY)
    library.impl("set_.source_Storage", _set_storage, _KEY)
    library.impl("copy_", lambda into, source, non_blocking=False: DEVICE.copy(into, source, non_blocking), _KEY)
    library.impl("_copy_from", _copy_from, _KEY)
    library.impl("_copy_from_and_resize", _copy_from, _KEY)
    library.impl("_local_scalar_dense", _item, _KEY)
    # CUDA has a kernel, in bfloat16; torch's own for other devices asks for the ends of groups.
    library.impl("_grouped_mm", functools.partial(_compute, _overload("_grouped_mm")), _KEY)
    library.impl("record_stream", _record_stream, _KEY)
    library.impl("scaled_dot_product_attention", _attend, f"Autograd{_KEY}")
    everything = torch.library.Library("_", "IMPL")
    _KEPT.append(everything)
    everything.fallback(_compute, _KEY)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _by_cpu_kernel(operator: Any, *args: Any, **options: Any) -> Any:
    """Views need no memory: the CPU's own kernel makes them of any tensor."""
    return operator.redispatch(_CPU_KERNEL, *args, **options)


def _set_storage(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    operator = torch.ops.aten.set_.source_Storage_storage_offset
    return operator.redispatch(_CPU_KERNEL, tensor, storage, 0, [storage.nbytes() // tensor.element_size()], [1])


def _copy_from(source: Tensor, into: Tensor, non_blocking: bool = False) -> Tensor:
    return DEVICE.copy(into, source, non_blocking)


def _item(tensor: Tensor) -> Any:
    DEVICE.used(tensor, is_written=False)
    DEVICE.synchronised("item", DEVICE.now(DEVICE.stream(index_of(tensor.device))))
    return unwrap(tensor).item()


def _record_stream(tensor: Tensor, stream: Any) -> None:
    memory = DEVICE._by_address.get(tensor.untyped_storage().data_ptr())
    if memory is not None:
        memory.recorded.add(stream)


@functools.cache
def _arguments_of(operator: Any) -> tuple[list[str], set[str], list[str]]:
    """Return the names of what an operator takes, of what it writes, and their types in order."""
    taken = operator._schema.arguments
    written = {argument.name for argument in taken if argument.alias_info and argument.alias_info.is_write}
    return [argument.name for argument in taken], written, [str(argument.type) for argument in taken]


def _mapped(change: Callable[[Any], Any], what: Any) -> Any:
    """Change what an operator takes or gives; torch's trees know many kinds of nodes, and operators only these."""
    return type(what)(_mapped(change, each) for each in what) if type(what) in (list, tuple) else change(what)


def _leaves(what: Any) -> Iterator[Any]:
    """Yield what an operator takes, as `_mapped` changes it."""
    if type(what) in (list, tuple):
        for each in what:
            yield from _leaves(each)
    else:
        yield what


def _compute(operator: Any, *args: Any, **options: Any) -> Any:
    """Compute an operator on the CPU, with the memory of the device."""
    name = operator._schema.name
    DEVICE.kernels[name.removeprefix("aten::")] += 1
    _look_at_order(name.removeprefix("aten::"), args)
    index = _device_of(operator, args, options)
    names, written, _ = _arguments_of(operator)
    ours: list[tuple[Tensor, Tensor]] = []
    stream = DEVICE.stream(index)
    stream.time += 1

    def taken(what: Any, *, is_written: bool) -> Any:
        if isinstance(what, torch.device):
            return _CPU
        if not isinstance(what, Tensor) or what.device.type != NAME:
            return what
        DEVICE.used(what, is_written=is_written)
        is_to_grow = is_written and not what.numel()  # what is written there decides how large it becomes
        ours.append((what, torch.empty(what.shape, dtype=what.dtype) if is_to_grow else unwrap(what)))
        return ours[-1][1]

    cpu_args = [
        _mapped(functools.partial(taken, is_written=name in written), arg)
        for name, arg in zip(names, args, strict=False)
    ]
    cpu_options = {
        name: _mapped(functools.partial(taken, is_written=name in written), value) for name, value in options.items()
    }
    pinned = cpu_options.pop("pin_memory", None)
    assert not pinned, "only memory of the CPU can be page-locked"
    if name in _SYNCHRONISING:
        DEVICE.synchronised(name.removeprefix("aten::"), DEVICE.now(stream))
    found = _called(operator, cpu_args, cpu_options)
    if name in _NEW:
        found.untyped_storage().fill_(WRONG)
    by_address = {cpu.untyped_storage().data_ptr(): (own, cpu) for own, cpu in ours if cpu.numel()}

    def given(what: Any) -> Any:
        if not isinstance(what, Tensor):
            return what
        for own, cpu in ours:
            if what is cpu:
                return own if cpu.shape == own.shape else _grown(own, cpu, index)
        own, _ = by_address.get(what.untyped_storage().data_ptr(), (None, None))
        if own is not None and what.numel():
            return own.as_strided(what.size(), what.stride(), what.storage_offset())
        if what._is_view() or what.storage_offset():
            what = what.clone()
        return DEVICE.wrap(what, index)

    return _mapped(given, found)


def _called(operator: Any, args: list[Any], options: dict[str, Any]) -> Any:
    """Call an operator, of which torch hands over numbers that stand for tensors as numbers."""
    _, _, types = _arguments_of(operator)
    numbers = [
        place
        for place, (kind, arg) in enumerate(zip(types, args, strict=False))
        if kind == "Tensor" and isinstance(arg, (bool, int, float, complex))
    ]
    if not numbers:
        return operator(*args, **options)
    with contextlib.suppress(RuntimeError, TypeError):  # most have another overload for numbers, with their types
        return operator.overloadpacket(*args, **options)
    # As a tensor without dims a number has no say in the type of the result, unless all others are so too.
    out = options.get("out")
    all_small = not any(arg.dim() for arg in args if isinstance(arg, Tensor))
    for place in numbers:
        wide = {float: torch.float64, int: torch.int64}.get(type(args[place]))
        args[place] = torch.tensor(args[place], dtype=out.dtype if all_small and out is not None else wide)
    return operator(*args, **options)


def _grown(own: Tensor, cpu: Tensor, index: int) -> Tensor:
    """Give an empty tensor the memory of what was written in its place."""
    made = DEVICE.wrap(cpu, index)
    return _by_cpu_kernel(
        torch.ops.aten.set_.source_Storage_storage_offset, own, made.untyped_storage(), 0, made.size(), made.stride()
    )


def _device_of(operator: Any, args: Sequence[Any], options: dict[str, Any]) -> int:
    """Return the index of the device that all tensors are on.

    Raises:
        RuntimeError: they are on several.
    """
    given = [*_leaves(tuple(args)), *_leaves(tuple(options.values()))]
    tensors = [each for each in given if isinstance(each, Tensor)]
    found = {tensor.device for tensor in tensors if tensor.device.type == NAME}
    others = [tensor for tensor in tensors if tensor.device.type != NAME]
    name = operator._schema.name
    if found and name in _TAKES_INDICES:
        for tensor in others:
            DEVICE.copies["to the device"] += 1
            DEVICE.bytes["to the device"] += tensor.nbytes
            DEVICE.syncs["copy to the device"] += 1
        others = []
    strange = [tensor for tensor in others if tensor.dim()]
    if len(found) > 1 or (found and strange):
        where = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got some on {where}")
    if found:
        return found.pop().index or 0
    named = [each for each in given if isinstance(each, torch.device)]
    return (named[0].index or 0) if named else 0


class _Attention(torch.autograd.Function):
    """By whatever the CPU takes, with its gradient; the CPU's graph is kept between."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any) -> Tensor:
        for tensor in (query, key, value, *(() if mask is None else (mask,))):
            DEVICE.used(tensor, is_written=False)
        index = query.device.index or 0
        with torch.enable_grad():
            ctx.inputs = [unwrap(tensor).clone().requires_grad_() for tensor in (query, key, value)]
            ctx.out = _attend_on_cpu(*ctx.inputs, None if mask is None else unwrap(mask), options)
        DEVICE.stream(index).time += 1
        return DEVICE.wrap(ctx.out.detach().clone(), index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        DEVICE.used(grad, is_written=False)
        DEVICE.kernels["attention backward in any order"] += not is_strict()
        grads = torch.autograd.grad(ctx.out, ctx.inputs, unwrap(grad))
        index = grad.device.index or 0
        return *(DEVICE.wrap(found.contiguous().clone(), index) for found in grads), None, None


def _attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    _device_of(torch.ops.aten.scaled_dot_product_attention.default, (query, key, value, attn_mask), {})
    has_mask = attn_mask is not None
    kernel = attention_kernel(query, key, has_mask=has_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    # Along the second and third axes of its grid.
    assert max(len(query), query.shape[1]) < 2**16, "CUDA error: invalid configuration argument"
    DEVICE.kernels[f"attention by {kernel}"] += 1
    assert not dropout_p, "nobody trains with dropout here"
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return _Attention.apply(query, key, value, attn_mask, options)


def _stand_in() -> None:
    """Put this device's own in the place of what torch reaches through C++ only, for a backend written in C++."""
    accelerator = torch.accelerator
    accelerator.device_count = lambda: NUM_DEVICES
    accelerator.synchronize = lambda device_index=None, /: DEVICE.synchronised("synchronize")
    accelerator.empty_cache = lambda: DEVICE.kernels.update(["empty_cache"])
    accelerator.empty_host_cache = lambda: None
    accelerator.memory_allocated = accelerator.memory_reserved = lambda index=None, /: DEVICE.allocated(index)
    accelerator.max_memory_allocated = accelerator.max_memory_reserved = lambda index=None, /: DEVICE.peak(index)
    accelerator.reset_peak_memory_stats = lambda index=None, /: DEVICE.reset_peak(index)
    accelerator.current_stream = lambda where=None, /: DEVICE.stream(index_of(where))
    accelerator.set_stream = DEVICE.set_stream
    total = 80 * 2**30

    def memory_info(index: Any = None, /) -> tuple[int, int]:
        most = total if DEVICE.limit is None else DEVICE.limit
        return most - DEVICE.allocated(index), most

    accelerator.get_memory_info = memory_info
    torch.Stream, torch.Event = PretendStream, PretendEvent
    torch.Tensor.record_stream = _record_stream  # the operator takes C++'s streams
    _stand_in_for_memory()


def _stand_in_for_memory() -> None:
    _device_constructors()  # `with torch.device(...)` keeps a list of them: of the originals
    for name in ("empty", "zeros", "ones", "full", "tensor"):
        setattr(torch, name, _perhaps_pinned(getattr(torch, name)))
    Tensor.pin_memory = lambda tensor, *_: DEVICE.pin(tensor.clone())
    Tensor.is_pinned = lambda tensor, *_: DEVICE.is_pinned(tensor)
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        return (DEVICE.resize if storage.device.type == NAME else resize)(storage, num_bytes)

    torch.UntypedStorage.resize_ = resized


def _perhaps_pinned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        tensor = make(*args, **options)
        return DEVICE.pin(tensor) if pin_memory else tensor

    return made
