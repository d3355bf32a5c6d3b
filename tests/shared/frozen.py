"""Imported last in the process that others are forked from: a collection of garbage in them leaves its pages alone.

Before that comes what Ray imports, which each of its workers would do for itself. Not Ray, which reads its environment
when it is imported.
"""

import contextlib
import gc
import importlib

import bare_runs

OF_RAY = ("google.protobuf.descriptor_pb2", "jsonschema", "msgpack", "pdb", "requests", "tracemalloc", "wcwidth")
for _name in OF_RAY:
    with contextlib.suppress(ImportError):  # where Ray is missing
        importlib.import_module(_name)
bare_runs.leave_out()
gc.collect()
gc.freeze()
