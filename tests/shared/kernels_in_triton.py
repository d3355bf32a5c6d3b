"""Run by tests with TRITON_INTERPRET=1: whether kernels are right, for types given by name."""

import json
import sys

import torch

from rallypoint.models import kernels, layer_kernels


def main() -> None:
    for name in sys.argv[1:]:
        where = torch.device("cpu"), getattr(torch, name)
        found = (
            kernels.is_right(kernels.Kernels(), *where),
            layer_kernels.is_right(layer_kernels.LayerKernels(), *where),
        )
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
