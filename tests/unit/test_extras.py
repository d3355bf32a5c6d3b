"""A package that only some runs need is missing, or there and of no use: each is said, with what to do."""

import sys

import pytest

from rallypoint.environments.reward import check_reward_spec
from rallypoint.extras import find_missing, find_unusable, is_installed, why_not
from rallypoint.observability.trackers import find_tracker_problem


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package with some code, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name: str, code: str | None) -> str:
        (tmp_path / name).mkdir()
        if code is not None:
            (tmp_path / name / "__init__.py").write_text(code)
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


def test_a_package_that_is_there_has_no_problem(package):
    assert find_unusable(package("fine_one", ""), "plot") is None


def test_a_package_that_is_missing_is_named_with_the_python_that_lacks_it_and_the_command():
    problem = find_missing("no_such_package", "plot")
    assert problem == (
        f"needs the package no_such_package, which is not installed for {sys.executable}; "
        "in a clone of rallypoint: pip install -e '.[plot]'"
    )
    assert find_unusable("no_such_package", "plot") == problem


def test_a_folder_without_code_is_no_package(package):
    """wandb makes a folder `wandb` where a script runs, and Python takes it for a namespace package."""
    package("swanlab", None)
    assert not is_installed("swanlab")
    assert "which is not installed" in str(find_tracker_problem("swanlab"))


def test_a_package_that_cannot_be_imported_is_not_asked_for_again(package):
    package("broken_one", "class VersionError(Exception): ...\nraise VersionError('gencode 6.31 needs runtime 7')")
    problem = str(find_unusable("broken_one", "plot"))
    assert "is installed, but cannot be imported: VersionError: gencode 6.31 needs runtime 7" in problem
    assert f"{sys.executable} -c 'import broken_one'" in problem
    assert ".[plot]" not in problem


def test_what_a_package_lacks_itself_is_named(package):
    package("lacking_one", "import no_such_package")
    assert "No module named 'no_such_package'; install no_such_package" in str(find_unusable("lacking_one", "plot"))


def test_a_failed_import_tells_a_missing_package_from_a_broken_one(package):
    package("old_one", "")
    with pytest.raises(ImportError) as old:
        from old_one import novelty  # noqa: F401 # pyright: ignore
    assert "old_one, which is installed, but cannot be imported: ImportError: cannot import name 'novelty'" in why_not(
        old.value, ("uvicorn", "old_one"), "serve"
    )
    missing = ModuleNotFoundError("No module named 'no_such_package'", name="no_such_package")
    assert ".[serve]" in why_not(missing, ("uvicorn", "no_such_package"), "serve")


def test_a_reward_whose_package_is_broken_is_refused_before_the_run(package, monkeypatch):
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    package("math_verify", "raise ImportError('no latex2sympy2')")
    assert "cannot be imported: ImportError: no latex2sympy2" in str(check_reward_spec("math"))
