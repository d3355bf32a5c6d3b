"""Run by tests: compiles kernels for accelerators that need not be there; a line of JSON for each of them."""

import json

from rallypoint.generation.native.accelerator import kernel as kernels

TARGETS = (("cuda", 90, 32), ("hip", "gfx942", 64))
STATES = ("out", "query", "keys", "values", "key", "value")
OTHERS = {
    **dict.fromkeys(("table", "num_blocks", "first_positions", "sizes"), "*i32"),
    **dict.fromkeys(("positions", "step", "places"), "*i64"),
    **dict.fromkeys(("room", "tops", "sums"), "*fp32"),
    **dict.fromkeys(("scaling", "softcap"), "fp32"),
}


def main() -> None:
    import triton  # here, as this file is looked into for examples where there is none
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**OTHERS, **dict.fromkeys(STATES, "*bf16")}
    widths = {"SIZE": 32, "DIM": 128, "SHARE": 16, "PARTS": 8, "HAS_CAP": True, "HAS_WINDOW": True}
    for target in TARGETS:
        for kernel in (kernels._write, kernels._attend, kernels._join):
            function = triton.jit(kernel)
            fixed = {name: width for name, width in widths.items() if name in function.arg_names}
            signature = {name: types.get(name, "i32") for name in function.arg_names}
            signature |= dict.fromkeys(fixed, "constexpr")
            triton.compile(ASTSource(function, signature, constexprs=fixed), target=GPUTarget(*target))
        print(json.dumps(target[:2]), flush=True)


if __name__ == "__main__":
    main()
