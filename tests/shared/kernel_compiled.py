"""Run by tests: compiles kernels for accelerators that need not be there; a line of JSON for each of them."""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rallypoint.generation import kernels

TARGETS = (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
STATES = ("out", "query", "keys", "values", "key", "value")
OTHERS = {
    **dict.fromkeys(("table", "num_blocks", "first_positions", "sizes"), "*i32"),
    **dict.fromkeys(("positions", "step", "places"), "*i64"),
    **dict.fromkeys(("room", "tops", "sums"), "*fp32"),
    **dict.fromkeys(("scaling", "softcap"), "fp32"),
}


def main() -> None:
    types = {**OTHERS, **dict.fromkeys(STATES, "*bf16")}
    widths = {"SIZE": 32, "DIM": 128, "SHARE": 16, "PARTS": 8, "HAS_CAP": True, "HAS_WINDOW": True}
    for target in TARGETS:
        for kernel in (kernels._write, kernels._attend, kernels._join):
            function = triton.jit(kernel)
            fixed = {name: width for name, width in widths.items() if name in function.arg_names}
            signature = {name: types.get(name, "i32") for name in function.arg_names}
            signature |= dict.fromkeys(fixed, "constexpr")
            triton.compile(ASTSource(function, signature, constexprs=fixed), target=target)
        print(json.dumps([target.backend, target.arch]), flush=True)


if __name__ == "__main__":
    main()
