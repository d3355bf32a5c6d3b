"""Where values come from, and what they become."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import ValidationError

from rallypoint.config import RECIPES, LoadedConfig, RunConfig, leaves, load_config, shipped_recipes, shown, values_of
from rallypoint.config.fields import section_of, unit_of
from rallypoint.config.load import expected
from rallypoint.config.source import describe, read, to_yaml
from rallypoint.config.unread import unread_sections
from rallypoint.errors import ConfigError
from rallypoint.run.folder import create_run

MINIMAL = {"recipe": "ppo", "reward.function": "digits", "model.create": {}, "data.generate": {}}


def load(*overrides: str) -> LoadedConfig:
    return load_config("base.yaml", overrides)


@pytest.mark.parametrize(
    ("recipe", "overrides", "bounds"),
    [
        ("gspo", ["loss.name=clip"], (0.2, 0.2)),
        ("dapo", ["loss.name=gspo"], (3e-4, 4e-4)),
        ("dapo", ["loss.name=decoupled"], (0.2, 0.28)),
        ("gspo", ["loss.clip_high=0.3", "loss={name: clip}"], (0.2, 0.3)),
        ("gspo", ["loss.clip_high=5e-4"], (3e-4, 5e-4)),
        ("grpo", ["loss.clip_high=0.3", "loss.name=[gspo]"], None),
    ],
)
def test_a_name_brings_its_own_defaults(recipe: str, overrides: list[str], bounds: tuple[float, float] | None):
    if bounds is None:
        with pytest.raises(ConfigError, match=r"loss\.name"):
            load_config(recipe, overrides, draft=True)
        return
    loss: Any = load_config(recipe, overrides, draft=True).config.loss
    assert (loss.clip_low, loss.clip_high) == bounds


@pytest.mark.parametrize(
    ("recipe", "overrides", "aggregation"),
    [
        ("grpo", [], "token"),
        ("grpo", ["loss.name=gspo"], "sequence"),
        ("grpo", ["loss.name=gmpo"], "sequence"),
        ("dapo", ["loss.name=sapo"], "sequence"),
        ("grpo", ["loss.name=sapo", "aggregation=token"], "token"),
        ("dr_grpo", ["loss.name=gspo"], "fixed_length"),
        ("gspo", [], "sequence"),
        ("gspo", ["loss.name=clip"], "token"),
        ("dapo", [], "token"),
        ("cispo", [], "token"),
    ],
)
def test_a_loss_brings_the_mean_of_its_paper_unless_one_is_set(recipe: str, overrides: list[str], aggregation: str):
    loaded = load_config(recipe, overrides, draft=True)
    assert loaded.config.aggregation == aggregation
    is_set = recipe == "dr_grpo" or any(one.startswith("aggregation") for one in overrides)
    assert (loaded.origins["aggregation"] == "default") == (not is_set)


@pytest.mark.parametrize("recipe", ["dapo", "gspo", "cispo", "math-dapo", "math-lora", "code"])
def test_a_recipe_named_after_its_clipping_takes_several_steps_a_batch_of_equally_many_rows(recipe: str):
    config = load_config(recipe, draft=True).config
    assert not config.updates_once
    assert config.num_rows % config.actor.num_mini_batches == 0


def test_each_value_knows_where_it_was_set(here: Path):
    (here / "mine.yaml").write_text("base: base.yaml\nactor:\n  optimizer:\n    lr: 1e-5\n")
    origins = load_config("mine.yaml", ["trainer.num_steps=9"]).origins
    assert origins["actor.optimizer.lr"] == "mine.yaml:4"
    assert origins["actor.optimizer.warmup_ratio"] == "base.yaml:11"
    assert origins["actor.optimizer.betas"] == "default"
    assert origins["trainer.num_steps"] == "command line"
    assert set(origins) == {name for name, _ in values_of(load().config)}


def test_a_file_builds_on_a_shipped_recipe_or_on_a_file_beside_it(here: Path):
    (here / "shipped.yaml").write_text("base: digits\nseed: 7\n")
    (here / "deep").mkdir()
    (here / "deep" / "above.yaml").write_text("base: ../base.yaml\nseed: 8\n")
    (here / "deep" / "two.yaml").write_text("base: above.yaml\ntrainer: {num_steps: 30}\n")
    assert load_config("shipped.yaml").config.seed == 7
    two = load_config("deep/two.yaml")
    assert (two.config.seed, two.config.trainer.num_steps, two.config.rollout.num_prompts) == (8, 30, 8)
    assert (two.name, two.origins["seed"]) == ("two", "above.yaml:2")


def test_the_name_is_that_of_the_file_the_recipe_or_the_run_folder(here: Path, monkeypatch: pytest.MonkeyPatch):
    run = here / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text((here / "base.yaml").read_text())
    assert [load_config(name).name for name in ("base.yaml", "digits", "runs/first")] == ["base", "digits", "first"]
    monkeypatch.chdir(run)
    assert load_config("config.yaml").name == "first"


def test_none_is_off_and_an_object_is_on(here: Path):
    (here / "off.yaml").write_text("base: base.yaml\nkl: null\n")
    assert load("kl=null").config.kl is None
    assert "reference" not in load("kl=null").config.roles
    assert load_config("off.yaml", ["kl={}"]).config.kl == RunConfig.model_validate(nested({**MINIMAL, "kl": {}})).kl
    half, left = load_config("off.yaml", ["kl.coef=0.5"]).config.kl, load("kl={}").config.kl
    assert half is not None
    assert half.coef == 0.5
    assert left is not None
    assert left.coef == 1e-2, "an empty object leaves what is on as it is"


def test_a_section_that_is_replaced_takes_its_origins_away(here: Path):
    loaded = load("kl=null", "kl.coef=0.5")
    assert loaded.origins["kl.coef"] == "command line"
    assert loaded.origins["kl.estimator"] == "default"


def test_the_last_override_wins_and_an_object_sets_several_keys(here: Path):
    rollout = load("rollout={num_prompts: 3, group_size: 2}", "rollout.num_prompts=5").config.rollout
    assert (rollout.num_prompts, rollout.group_size, rollout.max_response_tokens) == (5, 2, 8)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4), ("3E-4", 3e-4), ("1e-06", 1e-6), ("+1.5e-3", 1.5e-3), (".5", 0.5), ("1.", 1.0), ("1", 1.0),
        ("1.0e-06", 1e-6), ("0.1", 0.1),
    ],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(here: Path, written: str, value: float):
    (here / "lr.yaml").write_text(f"base: base.yaml\nactor: {{optimizer: {{lr: {written}}}}}\n")
    assert load(f"actor.optimizer.lr={written}").config.actor.optimizer.lr == value
    assert load_config("lr.yaml").config.actor.optimizer.lr == value


@pytest.mark.parametrize("name", ["2026-01-01", "010", "1:30", "0x1f", "1_2e", "'5'", '"null"', "a b", "e5"])
def test_what_is_no_number_is_text(here: Path, name: str):
    assert load(f"trainer.name={name}").config.trainer.name == name.strip("'\"")


def test_overrides_are_yaml(here: Path):
    config = load(
        "data.generate=null",
        "data.train=[a.jsonl, 'b c.parquet']",
        "reward.function=r.py:f",
        "data.shuffle=false",
        "cluster.pools={main: [1, 2]}",
    ).config
    assert config.data.train == ("a.jsonl", "b c.parquet")
    assert config.data.shuffle is False
    assert config.cluster.pools == {"main": (1, 2)}
    assert load("data.generate=null", "data.train=a.jsonl", "reward.function=r.py:f").config.data.train == ("a.jsonl",)


def test_a_config_is_frozen(here: Path):
    config = load().config
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        config.actor.optimizer.lr = 1.0


OWN = ("model.path=m", "data.train=d.jsonl", "reward.function=r.py:f", "model.create=null", "data.generate=null")


def own_of(name: str) -> tuple[str, ...]:
    """Return what a user sets in a recipe; one that trains on files as they are has no reward."""
    spec = RECIPES[load_config(name, draft=True).config.recipe]
    own = tuple(one for one in OWN if spec.reads("reward") or not one.startswith("reward."))
    return (*own, "teacher.path=t") if spec.reads("teacher") else own


@pytest.mark.parametrize("name", shipped_recipes())
def test_one_recipe_shows_at_most_150_keys_where_a_section_that_is_off_shows_one(name: str):
    config = load_config(name, own_of(name)).config
    shown_keys = [dotted for dotted, _ in values_of(config)]
    assert len(shown_keys) <= 150
    assert ("model.lora" in shown_keys) == (config.model.lora is None), "off: one key"


def test_each_key_has_a_meaning_and_a_default_in_one_place():
    known = leaves(RunConfig)
    for dotted, info in known.items():
        assert info.description, dotted
        assert info.description.endswith("."), dotted
        assert len(info.description) <= 120, dotted
    assert {dotted for dotted, info in known.items() if info.is_required()} == {
        "recipe",
        "advantage.function",
        "loss.function",
    }


def test_every_section_says_what_it_is_for():
    def sections(kind):
        for name, info in kind.model_fields.items():
            inner = section_of(info)
            if inner:
                yield name, info, inner
                yield from sections(inner)

    for name, info, inner in sections(RunConfig):
        assert info.description, name
        assert inner.__doc__, name


def test_every_number_has_a_bound_and_what_is_measured_has_its_unit():
    units = {
        "tokens": "tokens", "token": "", "steps": "steps", "prompts": "prompts", "rows": "rows", "s": "s",
        "gib": "GiB", "rollouts": "rollouts",
    }  # fmt: skip
    for dotted, info in leaves(RunConfig).items():
        words = dotted.rsplit(".", 1)[-1].split("_")
        takes = expected(info)
        if takes.startswith(("a number", "a whole number")):
            assert any(word in takes for word in (" from ", " above ", " of at least ")), dotted
        if takes.startswith(("a number", "a whole number")) and words[-1] in units:
            assert unit_of(info) == units[words[-1]], dotted


def test_roles_follow_from_the_recipe_and_from_kl(here: Path):
    grpo = ("recipe=grpo",)
    assert list(load().config.roles) == ["actor", "rollout", "reference", "critic"]
    assert list(load(*grpo).config.roles) == ["actor", "rollout", "reference"]
    assert list(load(*grpo, "kl=null").config.roles) == ["actor", "rollout"]
    no_model = dict.fromkeys(("reward.placement", "reward.mesh"), "reward.path=null")
    of_files = ["data.max_row_tokens", "data.num_examples", "preference", "teacher"]
    of_files += [f"data.columns.{name}" for name in ("messages", "completion", "chosen", "rejected")]
    assert unread_sections(load().config) == no_model | dict.fromkeys(of_files, "recipe=ppo")
    assert unread_sections(load(*grpo, "kl=null").config) == {
        "critic": "recipe=grpo", "reference": "kl=null", **no_model, **dict.fromkeys(of_files, "recipe=grpo"),
    }  # fmt: skip


def test_what_a_recipe_does_not_read_may_stand_in_a_file_and_is_not_judged(here: Path):
    (here / "other.yaml").write_text(
        "base: base.yaml\nrecipe: grpo\ncritic: {num_mini_batches: 99}\n"
        "reference: {placement: {pool: main}}\nkl: null\n"
    )
    assert load_config("other.yaml").config.critic.num_mini_batches == 99
    with pytest.raises(ConfigError, match=r"critic\.num_mini_batches"):
        load_config("other.yaml", ["recipe=ppo"])


def test_the_critic_has_a_whole_optimizer_of_its_own_with_a_higher_rate(here: Path):
    critic = load("critic.optimizer={schedule: cosine, betas: [0.8, 0.9]}", "actor.optimizer.lr=0.5").config.critic
    assert (critic.optimizer.lr, critic.optimizer.schedule, critic.optimizer.betas) == (1e-5, "cosine", (0.8, 0.9))
    sections: list[Any] = [RunConfig.model_fields[name].annotation for name in ("actor", "critic")]
    actors, critics = (section.model_fields["optimizer"].annotation.model_fields for section in sections)
    assert list(actors) == list(critics)
    assert [name for name in actors if actors[name].default != critics[name].default] == ["lr"]


def test_ranks_default_to_the_whole_pool_and_rollout_shares_the_actor_where_it_can(here: Path):
    config = load("cluster.pools.main=[2,2]", "rollout.placement.num_ranks=3").config
    assert (config.num_ranks("actor"), config.num_ranks("rollout")) == (4, 3)
    assert config.rollout_shares_actor
    assert not load("actor.placement.num_ranks=1").config.rollout_shares_actor
    assert not load("cluster.pools.second=[1]", "rollout.placement.pool=second").config.rollout_shares_actor
    assert not load("actor.mesh.tp=2").config.rollout_shares_actor
    assert not load("actor.mesh.dp_shard=2").config.rollout_shares_actor
    assert load("actor.mesh.sp=2").config.rollout_shares_actor
    heads = ("model.create.hidden_size=64", "model.create.num_heads=2", "model.create.num_key_value_heads=2")
    assert not load("rollout.engine=vllm", *heads).config.rollout_shares_actor


def test_ranks_that_no_other_axis_takes_are_copies_of_the_model(here: Path):
    config = load("cluster.pools.main=[4,4]", "actor.mesh.tp=2", "actor.mesh.dp_shard=2").config
    assert config.mesh("actor") == {"dp_replicate": 2, "dp_shard": 2, "ep": 1, "cp": 1, "sp": 1, "tp": 2}
    assert config.mesh("rollout") == {"dp_replicate": 8, "dp_shard": 1, "ep": 1, "cp": 1, "sp": 1, "tp": 1}
    assert (config.num_parts("actor"), config.num_parts("rollout")) == (4, 8)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_described_and_lacks_only_what_is_the_users(name: str):
    assert describe(shipped_recipes()[name]).endswith(".")
    problems: tuple[str, ...] = ()
    try:
        load_config(name)
    except ConfigError as error:
        problems = error.problems
    required = ("model.path: required", "data.train: required", "reward.function: required", "teacher.path: required")
    assert all(problem.startswith(required) for problem in problems)
    assert load_config(name, own_of(name)).config.model.path == "m"


def nested(dotted: dict[str, object]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in dotted.items():
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return tree


@pytest.mark.parametrize("more", [(), ("recipe=grpo", "kl=null"), ("reward.function=rewards.py:f", "loss.dual_clip=3")])
def test_the_config_of_a_run_folder_loads_to_the_same_config(here: Path, more: tuple[str, ...]):
    (here / "rewards.py").write_text("")
    loaded = load(f"trainer.runs_dir={here / 'runs'}", "trainer.name='3e-4'", *more)
    again = load_config(str(create_run(loaded).path))
    values: dict[str, Any] = dict(values_of(again.config))
    values["reward.function"] = values["reward.function"].replace(f"{here}/", "")
    assert values == dict(values_of(loaded.config))
    assert again.config.trainer.name == "3e-4"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="ascii"))
TREES = st.dictionaries(
    st.from_regex(r"\A[a-z0-9][a-z0-9_]{0,8}\Z"), LEAVES | st.lists(LEAVES, max_size=3), min_size=1, max_size=5
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=TREES)
def test_what_is_written_is_what_is_read(tmp_path: Path, values: dict[str, object]):
    values = {name: value for name, value in values.items() if name != "base"}
    if values:
        (tmp_path / "any.yaml").write_text(to_yaml(values), encoding="utf-8")
        assert read(str(tmp_path / "any.yaml")).values == values


@pytest.mark.parametrize(
    "text", ["3e-4", "1e5", "010", "1:30", "2026-01-01", "yes", "null", "5", ".5", "", "a: b", "~"]
)
def test_text_that_looks_like_something_else_stays_text(tmp_path: Path, text: str):
    (tmp_path / "any.yaml").write_text(to_yaml({"trainer": {"name": text}}))
    assert read(str(tmp_path / "any.yaml")).values == {"trainer": {"name": text}}


def test_values_are_shown_as_in_yaml():
    assert shown(True) == "true"
    assert shown(("a", 1, None)) == "['a', 1, null]"
    assert len(shown(list(range(1000)))) < 150


def test_off_the_cpu_half_precision_and_checkpointing_are_the_defaults_and_the_cpu_keeps_its_own(here):
    def sections(*overrides):
        config = load_config("base.yaml", overrides).config
        return config.model.dtype, config.engine.activations

    assert sections() == ("float32", "keep")
    assert sections("cluster.device=cuda") == ("bfloat16", "checkpoint")
    assert sections("cluster.device=cuda", "model.dtype=float32", "engine.activations=keep") == ("float32", "keep")


@pytest.mark.parametrize(("num_steps", "every"), [(1, 5), (40, 5), (120, 12), (1000, 20)])
def test_checkpoints_are_saved_by_default_every_tenth_of_a_run_but_from_5_to_20_steps(
    here: Path, num_steps: int, every: int
):
    assert load(f"trainer.num_steps={num_steps}").config.checkpoint_every_steps == every
    assert load(f"trainer.num_steps={num_steps}", "checkpoint.every_steps=3").config.checkpoint_every_steps == 3
