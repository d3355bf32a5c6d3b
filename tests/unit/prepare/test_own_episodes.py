"""An episode of the user's: from the config, checked before a start, trusted as a reward function is."""

import pytest

from rallypoint.environments.environment import single_turn
from rallypoint.environments.given import named
from rallypoint.errors import ConfigError
from rallypoint.prepare.material import examine_dry
from rallypoint.prepare.own_functions import episode_of
from rallypoint.prepare.preflight import load_checked, load_named
from rallypoint.run.folder import anchored, create_run
from rallypoint.run.record import external_inputs

EPISODES = """
from rallypoint.types import Trajectory

async def good(prompt, client):
    return Trajectory(turns=(await client.sample(prompt.tokens),))

def plain(prompt, client):
    return good(prompt, client)

async def short(prompt):
    return None

class Environment:
    pass
"""
GOOD = "rollout.episode=episodes.py:good"


async def ours(prompt, client):
    """An episode that Python gives."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The folder of the file, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "episodes.py").write_text(EPISODES)
    return tmp_path


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("rollout.episode=episodes.py", "did you mean|'episodes.py:episode'"),
        ("rollout.episode=episode.py:good", "episode.py does not exist .*did you mean 'episodes.py'"),
        ("rollout.episode=episodes.py:god", "rollout.episode='episodes.py:god': .*good"),
        ("rollout.episode=episodes.py:short", r"expected an async function of \(client, example\).* takes \(prompt\)"),
        ("rollout.episode=episodes.py:plain", "expected an async function .*found plain, which is not async"),
        ("rollout.episode='@good'", "give it again, with .*episode=good"),
        (f"{GOOD} rollout.over_sampling=99", "rollout.over_sampling=99 does not go with the episode episodes.py:good"),
        (
            f"{GOOD} recipe=opd teacher.hint='{{ground_truth}}'",
            "teacher.hint does not go with the episode episodes.py:good",
        ),
    ],
)
def test_a_wrong_episode_is_refused_by_its_key_before_anything_is_imported(keys, told):
    with pytest.raises(ConfigError, match=told):
        load_checked("digits-grpo", keys.split(" "))


@pytest.mark.parametrize(("name", "told"), [("Environment", "found Environment")])
def test_what_only_the_import_tells_is_refused_by_a_dry_run(name, told):
    config = load_checked("digits-grpo", [f"rollout.episode=episodes.py:{name}"]).config
    with pytest.raises(ConfigError, match=rf"rollout.episode='episodes.py:{name}': expected an async function.*{told}"):
        examine_dry(config)


def test_a_recipe_has_one_episode_its_own_or_that_of_the_config():
    single, named = (load_checked("digits-grpo", keys).config for keys in ([], [GOOD]))
    assert episode_of(single, None) is single_turn
    assert episode_of(single, ours) is ours
    assert episode_of(named, None).__name__ == "good"
    with pytest.raises(ConfigError, match="the recipe grpo has an episode of its own"):
        episode_of(named, ours)
    with pytest.raises(ConfigError, match="over_sampling=999 does not go with the episode ours"):
        episode_of(load_checked("digits-grpo", ["rollout.over_sampling=999"]).config, ours)


def test_a_function_has_a_name_in_configs_as_long_as_python_gives_it():
    with named(ours) as spec:
        assert episode_of(load_checked("digits-grpo", [f"rollout.episode='{spec}'"]).config, None) is ours
        inner = named(ours)
        with inner as second:
            assert second != spec
    with pytest.raises(ConfigError, match="give it again"):
        load_checked("digits-grpo", [f"rollout.episode='{spec}'"])


def test_a_run_names_the_very_file_from_any_working_directory_and_records_its_content(here):
    config = anchored(load_checked("digits-grpo", [GOOD]).config)
    assert config.rollout.episode == f"{here}/episodes.py:good"
    before = external_inputs(config)["rollout.episode"]
    (here / "episodes.py").write_text(f"{EPISODES}# edited\n")
    assert before != external_inputs(config)["rollout.episode"]


def test_the_episode_of_a_foreign_run_folder_is_not_run_unless_it_is_named(here, monkeypatch):
    run = create_run(load_checked("digits-grpo", [GOOD]))
    assert load_named(str(run.path), []).config.rollout.episode == f"{here}/episodes.py:good"
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "of another user"))
    with pytest.raises(ConfigError, match=rf"rollout.episode \({here}/episodes.py:good\) is code that .* names"):
        load_named(str(run.path), [])
    named = [f"rollout.episode={here}/episodes.py:good"]
    assert load_named(str(run.path), named).config.rollout.episode == f"{here}/episodes.py:good"
