"""Run by tests with TRITON_INTERPRET=1: whether kernels of heads and rotations are right, for types given by name."""

import json
import sys

import torch

from rallypoint.models.kernels import Kernels, is_right


def main() -> None:
    for name in sys.argv[1:]:
        print(json.dumps(is_right(Kernels(), torch.device("cpu"), getattr(torch, name))), flush=True)


if __name__ == "__main__":
    main()
