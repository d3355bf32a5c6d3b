"""Run by tests: compiles kernels for kinds of accelerators that need not be there; a line of JSON for each of them."""

import json
import sys

from rallypoint.generation.native.accelerator import kernel as attention
from rallypoint.models import kernels, layer_kernels

TARGETS = {"cuda": (90, 32), "hip": ("gfx942", 64)}
STATES = ("out", "query", "keys", "values", "key", "value", "logits", "states", "cos", "sin")
STATES += (
    "total",
    "sinks",
    "normed",
    "added",
    "weight",
    "given",
    "query_norm",
    "key_norm",
    "gate",
    "up",
    "grad",
    "of_gate",
    "of_up",
)
OTHERS = {
    **dict.fromkeys(("table", "num_blocks", "first_positions", "sizes"), "*i32"),
    **dict.fromkeys(("positions", "step", "places", "targets"), "*i64"),
    **dict.fromkeys(("room", "tops", "sums", "largest", "log_total", "entropy", "normaliser"), "*fp32"),
    **dict.fromkeys(("of_shares", "of_entropy", "of_targets"), "*fp32"),
    **dict.fromkeys(("scaling", "softcap", "temperature", "lowest", "eps"), "fp32"),
}


def main() -> None:
    import triton  # here, as this file is looked into for examples where there is none
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**OTHERS, **dict.fromkeys(STATES, "*bf16")}
    widths = {"SIZE": 32, "DIM": 128, "SHARE": 16, "PARTS": 8, "HAS_CAP": True, "HAS_WINDOW": True, "HAS_ENTROPY": True}
    widths |= {"HAS_SINKS": True, "BLOCK": 4096, "HEADS": 16, "HALF": 64, "SIGN": -1.0, "HAS_NORM": True}
    ours = attention._write, attention._attend, attention._join, kernels._statistics, kernels._gradient
    exact = (
        *(kernels._rotate, layer_kernels._add_norm, layer_kernels._turn),
        *(layer_kernels._swiglu, layer_kernels._swiglu_gradient),
    )
    for kind in sys.argv[1:]:
        target = GPUTarget(kind, *TARGETS[kind])
        for kernel in (*ours, *exact):
            function = triton.jit(kernel)
            fixed = {name: width for name, width in widths.items() if name in function.arg_names}
            signature = {name: types.get(name, "i32") for name in function.arg_names}
            signature |= dict.fromkeys(fixed, "constexpr")
            is_exact = kernel in exact  # launched so, to round as operators do
            options = {"enable_fp_fusion": False} if is_exact else {}
            made = triton.compile(ASTSource(function, signature, constexprs=fixed), target, options)
            assert not (is_exact and "fma." in made.asm.get("ptx", "")), "a product is added before it is rounded"
        print(json.dumps([kind, TARGETS[kind][0]]), flush=True)


if __name__ == "__main__":
    main()
