"""What the first lines of a run say of the sandbox that a reward function opens."""

import pytest

from rallypoint.config import load_config
from rallypoint.environments.given import giving
from rallypoint.environments.sandbox import SandboxError, open_sandbox
from rallypoint.prepare.material import sandboxes


def config_of(spec):
    return load_config("digits-grpo", [f"reward.function='{spec}'"]).config


@pytest.fixture
def tier():
    try:
        return open_sandbox().name
    except SandboxError as error:
        pytest.skip(str(error))


def test_the_sandbox_of_a_function_of_ones_own_is_said(tmp_path, tier):
    opening = "from rallypoint.environments.sandbox import open_sandbox\n"
    head = f"{opening}def f(data_source, solution_str, ground_truth, **_):\n"
    (tmp_path / "opens.py").write_text(f"{head}    return open_sandbox().run(solution_str).status == 'ok'\n")
    (tmp_path / "remote.py").write_text(f"{head}    return open_sandbox('http://x').run(solution_str).status == 'ok'\n")
    own = f"{tmp_path}/opens.py:f"
    assert list(sandboxes(config_of(own))) == [f"{tier} (open_sandbox() of {own})"]
    assert list(sandboxes(config_of(f"{tmp_path}/remote.py:f"))) == []
    assert list(sandboxes(config_of("digits"))) == []


def test_the_sandbox_of_a_function_that_python_gives_is_said(tier):
    with giving(lambda completion: float(open_sandbox().run(completion).status == "ok")) as spec:
        assert list(sandboxes(config_of(spec))) == [f"{tier} (open_sandbox() of {spec})"]
