"""Drills: runs that are broken in twenty ways end with the weights of untouched ones; what is no drill is refused."""

import pytest

from rallypoint.errors import ConfigError
from rallypoint.recipes.drilling import Drills
from rallypoint.recipes.drills import SHORT, chosen, table

pytestmark = pytest.mark.lasting_ray


@pytest.fixture(scope="module")
def drills(tmp_path_factory):
    return Drills(tmp_path_factory.mktemp("drills"))


@pytest.mark.parametrize("name", SHORT)
def test_a_run_that_is_broken_ends_with_the_weights_of_its_twin(drills, name):
    (drill,) = [one for one in table() if one.name == name]
    assert drills.do(drill).problem == ""


def test_names_of_drills_are_their_own_and_one_that_does_not_exist_is_refused():
    names = [drill.name for drill in table()]
    assert len(names) == len(set(names)) >= 200
    assert {name.partition("/")[0] for name in SHORT} == {"one", "split", "ahead"}
    with pytest.raises(ConfigError, match=r"no drill has 'actor.trian' in its name; `rally drill --list` has all 2"):
        chosen(["one/actor", "actor.trian"])


def test_a_drill_is_failed_by_a_failpoint_that_never_fires(drills):
    from rallypoint.recipes.drills import Drill

    assert "never fired" in drills.do(Drill("one", "StepDone:step=9:raise")).problem
