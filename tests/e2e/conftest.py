"""Runs that take seconds, below a folder of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_runs
from tiny_runs import Runs

from rallypoint.display import save_curve
from rallypoint.page import write_report
from rallypoint.recipes import ending
from rallypoint.run.folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture(scope="module")
def pictures() -> Iterator[None]:
    """Have runs in this process draw the picture of their end, and write their page; see `bare_runs`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending, "save_curve", save_curve)
        patch.setattr(ending, "write_report", write_report)
        yield


@pytest.fixture(autouse=True)
def share_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all runs in this process the same local Ray, where its start is not what is tested."""
    if request.node.get_closest_marker("lasting_ray") is not None:
        from lasting_ray import RayCluster, lasting_ray

        monkeypatch.setattr(RayCluster, "start_local", lambda **_: lasting_ray(request))


@pytest.fixture(scope="session")
def weights_of() -> Callable[[RunFolder], dict[str, str]]:
    """See `tiny_runs.weights_of`."""
    return tiny_runs.weights_of
