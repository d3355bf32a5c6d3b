"""What a worker checks before it begins."""

import pickle

import pytest

from rallypoint.errors import PlacementError
from rallypoint.roles.placement import SharedFolder


def test_a_node_that_sees_the_run_folder_is_content(tmp_path):
    pickle.loads(pickle.dumps(SharedFolder.marked(tmp_path))).check()


def test_a_node_that_does_not_see_the_run_folder_is_named_with_the_remedy(tmp_path):
    folder = SharedFolder.marked(tmp_path)
    (tmp_path / ".shared").unlink()
    with pytest.raises(PlacementError, match=r"node .+ does not see the run folder .*: set trainer.runs_dir"):
        folder.check()


def test_another_folder_of_the_same_name_is_not_taken_for_the_run_folder(tmp_path):
    folder = SharedFolder.marked(tmp_path)
    SharedFolder.marked(tmp_path)  # as if this node had a folder of its own there
    with pytest.raises(PlacementError, match="does not see the run folder"):
        folder.check()
