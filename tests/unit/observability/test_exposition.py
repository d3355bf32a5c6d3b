"""What Prometheus scrapes is read back line by line, as its format says."""

import math
import re

from rallypoint.observability.exposition import exposition

LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{run="((?:[^"\\]|\\.)*)"(?:,name="((?:[^"\\]|\\.)*)")?\} (\S+)')


def test_every_metric_has_a_type_once_and_a_line_that_the_format_allows():
    metrics = {"validation/pass@4/a b": 0.25, "validation/pass_4/a_b": 0.5, "actor/loss": math.nan, "x": -math.inf}
    lines = exposition({'a "run"\n': (7, metrics), "b": (8, {"x": 1})}).splitlines()
    assert [line for line in lines if 'run="b"' in line] == [
        'rallypoint_step{run="b"} 8',
        'rallypoint_x{run="b",name="x"} 1',
    ]
    lines = [line for line in lines if 'run="b"' not in line]
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed)) == 4
    found = {}
    for line in lines:
        if not line.startswith("#"):
            name, run, own, value = LINE.fullmatch(line).groups()
            assert name in typed
            assert run == r"a \"run\"\n"
            found[own] = float(value)
    assert found.pop(None) == 7
    assert math.isnan(found.pop("actor/loss"))
    assert found == {name: value for name, value in metrics.items() if name != "actor/loss"}
