"""Imported last in the process that others are forked from: a collection of garbage in them leaves its pages alone.

Before that comes what each fork would do for itself, in half of the time of a tiny run: what Ray imports, what a run
imports when it needs it, what transformers compiles to rename weights, and the steps that sample without Python. Not
Ray, which reads its environment when it is imported; and nothing that would leave a thread.
"""

import contextlib
import gc
import importlib

import bare_runs
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from rallypoint.cpu.script import without_python
from rallypoint.generation.native.cpu.backend import decode, decode_steps
from rallypoint.generation.sampler import sample_tokens

OF_RAY = ("google.protobuf.descriptor_pb2", "jsonschema", "msgpack", "pdb", "requests", "tracemalloc", "wcwidth")
OF_RUNS = (
    "matplotlib.ticker",
    "rallypoint.cli.main",
    "rallypoint.recipes.grpo",
    "rallypoint.recipes.ppo",
    "transformers.generation.utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
for _name in (*OF_RAY, *OF_RUNS):
    with contextlib.suppress(ImportError):  # where Ray or an extra is missing
        importlib.import_module(_name)
get_checkpoint_conversion_mapping("llama")
for _steps in (decode, decode_steps, sample_tokens):
    without_python(_steps, torch.device("cpu"))
bare_runs.leave_out()
gc.collect()
gc.freeze()
