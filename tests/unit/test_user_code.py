"""Functions in files of the user's: read without being run, sent as their text, and imported."""

import pickle
import sys

import pytest

from rallypoint.errors import UserCodeError
from rallypoint.user_code import UserFunction, find_misfits

FILE = """
import dataclasses
from rallypoint_sibling_of_a_test import SCALE

@dataclasses.dataclass
class Result:
    value: float

def scaled(x, *, factor: float = 1.0, label: "str | None" = None, power: int = 1):
    return Result(SCALE * factor * x**power)

def fails(x):
    return 1 / 0

anything = lambda *a, **b: a
"""


@pytest.fixture
def file(tmp_path):
    path_before = list(sys.path)
    (tmp_path / "rallypoint_sibling_of_a_test.py").write_text("SCALE = 2.0")
    (tmp_path / "mine.py").write_text(FILE)
    yield tmp_path / "mine.py"
    sys.path[:] = path_before
    sys.modules.pop("rallypoint_sibling_of_a_test", None)


def test_a_function_is_called_with_its_parameters_and_finds_the_files_beside_it(file):
    assert UserFunction.read(f"{file}:scaled", {"factor": 3.0})(5.0).value == 30.0


def test_a_file_beside_it_takes_no_name_from_python_or_a_package(file):
    for name in ("json", "pydantic", "colorsys"):
        file.with_name(f"{name}.py").write_text("raise SystemExit(3)")
    file.write_text("import colorsys\nimport json\nscaled = lambda x: json.dumps([x, colorsys.ONE_THIRD > 0])")
    assert UserFunction.read(f"{file}:scaled", {})(1) == "[1, true]"
    file.write_text("from pydantic import fields\nscaled = None")
    with pytest.raises(UserCodeError, match=r"mine.py imports pydantic, of which there are two: .*pydantic.py, and"):
        UserFunction.read(f"{file}:scaled", {}).load()


def test_a_file_of_the_same_name_in_another_folder_is_not_taken_for_the_one_beside_it(file, tmp_path):
    assert UserFunction.read(f"{file}:scaled", {})(1.0).value == 2.0
    other = tmp_path / "other"
    other.mkdir()
    (other / "rallypoint_sibling_of_a_test.py").write_text("SCALE = 7.0")
    (other / "mine.py").write_text(FILE)
    with pytest.raises(UserCodeError, match=r"imports rallypoint_sibling_of_a_test, of which there are two"):
        UserFunction.read(f"{other / 'mine.py'}:scaled", {}).load()


def test_where_it_is_sent_the_text_that_was_read_is_run_whatever_became_of_the_file(file):
    sent = pickle.dumps(UserFunction.read(f"{file}:scaled", {"power": 2}))
    file.write_text("scaled = None")
    assert pickle.loads(sent)(3.0).value == 18.0
    file.unlink()
    assert pickle.loads(sent)(4.0).value == 32.0


def test_a_file_is_run_once_in_a_process_and_again_when_its_text_is_another(file):
    first, again = (UserFunction.read(f"{file}:scaled", {}).load() for _ in range(2))
    assert first is again
    file.write_text(FILE.replace("SCALE * factor", "10 * factor"))
    assert UserFunction.read(f"{file}:scaled", {})(1.0).value == 10.0


def test_reading_runs_nothing(file):
    file.write_text("raise SystemExit\n" + FILE)
    function = UserFunction.read(f"{file}:scaled", {})
    assert list(find_misfits(f"{file}:scaled", "x", {"factor": 2})) == []
    with pytest.raises(UserCodeError, match="raised while it was imported"):
        function(1.0)


def test_a_name_that_is_not_there_is_an_error_with_the_nearest(file):
    with pytest.raises(UserCodeError, match=r"has no function 'scale'; did you mean 'scaled'\?"):
        UserFunction.read(f"{file}:scale", {}).load()


MISFITS = {
    "scaled": ({"factr": 2.0}, "it takes (x, factor, label, power), but is called with (x, factr): got an unexpected"),
    "fails": ({"factor": 2.0}, "it takes (x), but is called with (x, factor)"),
    "nothing": ({}, "has no function 'nothing'"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_cannot_be_called_is_said_from_the_text_alone(file, name):
    parameters, said = MISFITS[name]
    (misfit,) = find_misfits(f"{file}:{name}", "x", parameters)
    assert said in misfit


VALUES = [
    ({"factor": 1}, None),
    ({"factor": 0.5, "label": None, "power": 3}, None),
    ({"label": "a"}, None),
    ({"factor": "0.5"}, "it has factor: float, found '0.5'"),
    ({"factor": True}, "it has factor: float, found True"),
    ({"power": 1.5}, "it has power: int, found 1.5"),
    ({"label": 3}, "it has label: 'str | None', found 3"),
]


@pytest.mark.parametrize(("parameters", "said"), VALUES)
def test_values_are_compared_with_simple_annotations(file, parameters, said):
    assert list(find_misfits(f"{file}:scaled", "x", parameters)) == ([said] if said else [])


def test_where_the_text_does_not_tell_nothing_is_said(file):
    assert list(find_misfits(f"{file}:anything", "x", {"a": 1})) == []
