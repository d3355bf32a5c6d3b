"""What takes most of the time of a tiny run, and is left out of the runs of tests: pictures, and doing things again.

A run ends with a picture of its learning curve and with its page, and its learners first count the operations of their
model. Each takes as long as some or all of its steps. Here no picture is drawn and no page is written, unless a test
asks for the fixture `pictures` (or for the page, as `tests/e2e/test_library.py`). Models that are alike are counted
once for all processes of the tests, as is what a device could do at best; and of models that ranks share, a sketch is
compared once with the family's own code. `tests/unit/display/test_curve.py`, `test_draw.py`, `tests/unit/page`,
`tests/unit/recipes/test_ending.py`, `tests/unit/observability/test_flops.py` and
`tests/unit/model_files/test_packing_check.py` test pictures, pages, counts, that measurement and sketches.

Collections of garbage leave modules out all the time, see `conftest.py`, so that a run need not begin and end that; nor
does it begin with a collection, for what earlier ones have left takes no memory of a device.

And functions and agents of one's own have a process at first, as on a machine of one core, and more when they mostly
wait: others would import what the first one has. `reward.num_processes` asks for more.
"""

import dataclasses
import functools
import hashlib
import os
import pickle
import re
import threading
import types
from pathlib import Path

from rallypoint.display.draw import CurveAsItGoes
from rallypoint.environments import pool
from rallypoint.model_files import load
from rallypoint.observability.flops import device_peak, flops_of
from rallypoint.recipes import ending, loop
from rallypoint.roles import learner

_COUNTED = Path(os.environ["RALLYPOINT_TEST_COUNTED"])
_WIDTH, _CHECK_SKETCH = pool._automatic, load._Loader._check_sketch


def leave_out() -> None:
    """Do so in this process, and in those that are forked from it."""
    ending.CurveAsItGoes = functools.partial(CurveAsItGoes, clock=lambda: 0.0)  # no time goes by, so none is due
    ending.save_curve = lambda folder: None
    ending.write_report = lambda runs, file: None
    loop.gc = types.SimpleNamespace(collect=lambda: None, freeze=lambda: None, unfreeze=lambda: None)
    learner.flops_of = _counted_once
    learner.device_peak = _measured_once
    pool._automatic = _of_one_core
    load._Loader._check_sketch = _sketched_once


def _of_one_core():
    return dataclasses.replace(_WIDTH(), least=1)


def _counted_once(model, adapt=None):
    """See `flops_of`: it depends on a model's class, its config, and its weights' names, shapes and gradients."""
    kinds = [(kind.__module__, kind.__qualname__) for kind in type(model).__mro__]
    weights = [(name, tuple(one.shape), one.requires_grad) for name, one in model.named_parameters()]
    return _once((kinds, _text_of(model.config), weights), lambda: flops_of(model, adapt))


def _sketched_once(loader, path, config, dtype, device, trust_remote_code):
    """See `_check_sketch`: it depends on the config, and on code in a folder, which is looked at each time."""
    given = (loader, path, config, dtype, device, trust_remote_code)
    key = (type(loader).__qualname__, _text_of(config), dtype, device.type)
    return _CHECK_SKETCH(*given) if trust_remote_code else _once(key, lambda: _CHECK_SKETCH(*given))


def _text_of(config):
    return re.sub(r'"_name_or_path": "[^"]*"', "", config.to_json_string(use_diff=False))


def _measured_once(device, dtype):
    """See `device_peak`."""
    return _once((device.type, dtype), lambda: device_peak(device, dtype))


def _once(what, find):
    """Return what was found of something, by whichever process of the tests was asked first."""
    key = hashlib.sha256(repr(what).encode()).hexdigest()
    file = _COUNTED / key
    if not file.exists():
        part = file.with_name(f"{key}.{os.getpid()}.{threading.get_ident()}")
        part.write_bytes(pickle.dumps(find()))
        part.rename(file)
    return pickle.loads(file.read_bytes())
