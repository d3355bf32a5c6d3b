"""What a machine is like: each look on machines that were made up, and all of them on this one."""

import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.prepare.checkup import (
    Driven,
    Finding,
    check_all,
    clock,
    cores,
    devices,
    disk,
    limits,
    looks,
    memory,
    package,
    shared_memory,
)

GIB = 2**30
H100 = ("NVIDIA H100", 81559)


def file(folder: Path, text: str) -> Path:
    path = folder / "file"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("driver", "cuda", "level", "advice"),
    [
        ("580.65.06", "13.0", "ok", ""),
        ("550.54.15", "12.8", "ok", ""),
        ("550.54.15", "13.0", "fault", "CUDA 13.0 needs driver 580 or newer"),
        ("470.82.01", "12.4", "fault", "CUDA 12.4 needs driver 525 or newer"),
        ("580.65.06", None, "fault", "install a build of torch with CUDA"),
    ],
)
def test_a_driver_that_is_too_old_for_torchs_cuda_is_a_fault(driver, cuda, level, advice, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = devices(Driven((H100,), driver), cuda)
    assert found.level == level
    assert advice in found.advice
    assert "NVIDIA H100, 81559 MiB" in found.said


def test_a_machine_without_a_gpu_is_fine():
    assert devices(None, None).level == "ok"


def test_a_container_with_fewer_cores_or_less_memory_than_its_machine_says_so(tmp_path):
    few = cores(8, file(tmp_path, "150000 100000\n"))
    assert (few.level, few.said) == ("note", "8, of which the container may use 1.5")
    assert "cluster.num_cpus_per_process" in few.advice
    assert cores(8, file(tmp_path, "max 100000\n")) == cores(8, tmp_path / "none") == Finding("ok", "cores", "8")
    meminfo = file(tmp_path, "MemTotal: 64 kB\nMemAvailable:  1048576 kB\n")
    assert memory(64 * GIB, meminfo).level == "fault"
    assert memory(64 * GIB, tmp_path / "none").said == "64.0 GiB of 64.0 GiB are free"


def test_docker_s_shared_memory_is_too_small_for_the_object_store():
    small = shared_memory(64 * 2**20)
    assert small.level == "note"
    assert "--shm-size" in small.advice
    assert shared_memory(2 * GIB).level == "ok"


def test_a_folder_that_cannot_be_written_and_few_open_files_are_named(tmp_path):
    assert disk(tmp_path / "runs" / "later").level in ("ok", "note", "fault")
    assert "/proc cannot be written" in disk(Path("/proc")).said
    assert limits(256).level == "note"
    assert limits(65_536).level == "ok"


def test_a_clock_that_is_set_meanwhile_or_stands_in_the_past_is_named():
    walls = iter((2e9, 2e9 + 5, 2e9 + 5))
    steady = iter((0.0, 0.0))
    assert "it was set +5.000 s" in clock(lambda: next(walls), lambda: next(steady), 0.0).said
    assert clock(lambda: 1e9, lambda: 0.0, 0.0).level == "fault"


def test_a_package_that_is_missing_or_too_old_says_how_to_get_it():
    assert package("torch").level == "ok"


def test_no_look_can_raise_or_hold_up_the_others():
    def fails():
        raise OSError("no such\ndevice")

    chosen = [("one", fails), ("two", lambda: time.sleep(60)), ("three", lambda: Finding("ok", "three", "there"))]
    one, two, three = check_all(chosen, 0.2)
    assert one.said == "cannot be looked at: OSError: no such"
    assert two.said.startswith("no answer within 0.2 s")
    assert three.level == "ok"


def test_the_command_has_a_line_for_everything_on_this_machine(tmp_path):
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "40"})
    assert result.exit_code in (0, 1), result.output
    lines = [line for line in result.stdout.splitlines() if not line.startswith("         -> ")]
    assert [line[8:22].strip() for line in lines] == [what for what, _ in looks(tmp_path)]
    assert ("fault" in result.stdout) == (result.exit_code == 1)


def test_every_extra_that_a_user_may_lack_is_looked_for():
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    of_developers = {"dev", "docs", "ray"}
    [found] = check_all([look for look in looks(Path()) if look[0] == "extras"])
    assert all(extra in found.said for extra in extras.keys() - of_developers)
