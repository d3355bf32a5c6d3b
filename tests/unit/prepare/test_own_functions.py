"""A loss and an advantage of one's own: from the config, checked before a start, trusted as a reward function is."""

import pickle

import pytest
import torch
from docs_blocks import blocks

from rallypoint.config import load_config
from rallypoint.errors import ConfigError
from rallypoint.prepare.material import examine_dry
from rallypoint.prepare.own_functions import check_own_functions
from rallypoint.prepare.preflight import load_checked, load_named
from rallypoint.recipes.recipe import actor_loss_of, advantage_of
from rallypoint.run.folder import anchored, create_run
from rallypoint.run.record import external_inputs
from rallypoint.testing import CASES

BAD = """
import torch

def summed(tokens):
    return -(tokens.ratio * tokens.advantages).sum()

def by_micro_batch(tokens):
    centred = tokens.advantages - tokens.advantages.sum() / max(1, len(tokens.advantages))
    return -tokens.ratio * centred

def in_place(tokens):
    return -tokens.ratio * tokens.advantages.mul_(2)

def not_a_number(tokens):
    return -tokens.ratio * (tokens.advantages - 7).log()

def by_row(rewards):
    return rewards.scores

def rewards_in_place(rewards):
    return rewards.token_rewards.sub_(1)

def raising(tokens):
    return tokens.no_such_field

def logarithm(rewards):
    return rewards.spread(rewards.scores.log())

def of_one_reward(rewards):
    return rewards.spread(rewards.components["right"])

def of_another(rewards):
    return rewards.spread(rewards.components["score"])

def as_numpy(tokens):
    return (-tokens.ratio * tokens.advantages).detach().numpy()

def detached(tokens):
    return (-tokens.ratio * tokens.advantages).detach()

def sometimes_detached(tokens):
    good = (tokens.advantages > 0).any()
    return -tokens.ratio * tokens.advantages if good else torch.zeros_like(tokens.advantages)

def drawing(tokens):
    return -tokens.ratio * torch.rand(len(tokens.ratio))

def root(tokens):
    return -tokens.ratio * tokens.advantages + (tokens.ratio - tokens.ratio.detach()).abs().sqrt()

def numbered(tokens):
    return -tokens.ratio * tokens.advantages, {7: tokens.ratio.detach()}

def leaving(tokens):
    raise SystemExit("no licence")

class Loss:
    def __init__(self, tokens): ...

async def waiting(tokens): ...

SEEN = []

def remembering(rewards):
    SEEN.append(rewards.scores)
    return rewards.spread(rewards.scores - len(SEEN))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the files of docs/algorithms.md, and one of careless functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(next(block for block in blocks("algorithms", "python") if "# mine.py" in block))
    (tmp_path / "mine.yaml").write_text(next(block for block in blocks("algorithms", "yaml") if "# mine.yaml" in block))
    (tmp_path / "bad.py").write_text(BAD)
    return tmp_path


def test_the_files_of_the_docs_are_a_config_and_what_it_names_computes(here):
    config = load_checked("mine.yaml", ["loss.parameters.floor=0.4"]).config
    check_own_functions(config)
    objective = pickle.loads(pickle.dumps(actor_loss_of(config))).objective
    loss = objective(CASES["usual"].tokens())
    assert loss.metrics().scalars().keys() == {"policy_loss", "approx_kl", "rare_fraction"}
    assert 0 < loss.metrics().scalars()["rare_fraction"] < 1
    advantages = advantage_of(config)(CASES["usual"].earned())
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-9)
    changed = load_checked("mine.yaml", ["loss.parameters.floor=0.0"])
    assert changed.origins["loss.parameters"] == "command line"
    without = changed.config
    assert float(actor_loss_of(without).objective(CASES["usual"].tokens()).sum) != pytest.approx(float(loss.sum))


def test_a_dry_run_holds_them_to_the_rules(here):
    lines = examine_dry(load_checked("mine.yaml").config)
    assert "loss           mine.py:my_loss, which keeps to every rule" in lines
    assert "advantage      mine.py:my_advantage, which keeps to every rule" in lines


def test_a_function_takes_the_place_of_a_name_and_a_name_that_of_a_function(here):
    (here / "over.yaml").write_text("base: mine.yaml\nloss: {name: gspo}\n")
    (here / "under.yaml").write_text("base: over.yaml\nloss: {function: 'mine.py:my_loss'}\n")
    assert load_config("over.yaml").config.loss.model_dump() == {
        "name": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
    }
    for recipe, overrides in (("under.yaml", []), ("digits", ["loss.function=mine.py:my_loss"])):
        assert load_config(recipe, overrides).config.loss.name == "own"


COMPLAINTS = {
    "loss.function=bad.py:summed": r"loss.function='bad.py:summed': .* shape \[18\], one number for each token",
    "loss.function=bad.py:by_micro_batch": r"cut into the micro-batches .* tokens of its own row alone",
    "loss.function=bad.py:in_place": "bad.py:in_place modified its argument advantages; write",
    "loss.function=bad.py:as_numpy": r"losses of .*bad.py:as_numpy must be a tensor of shape \[18\], .* found ndarray",
    "loss.function=bad.py:detached": r"bad.py:detached do not depend on tokens.logprobs: .* without detach\(\)",
    "loss.function=bad.py:sometimes_detached": "do not depend on tokens.logprobs: .* torch.where instead of",
    "loss.function=bad.py:drawing": "the same batch has other losses the second time: keep nothing",
    "loss.function=bad.py:root": r"the gradient of the losses of .*bad.py:root by tokens.logprobs is nan for",
    "loss.function=bad.py:numbered": "numbered watches needs a name, found 7",
    "loss.function=bad.py:leaving": r"bad.py:leaving raised:(?s:.*)SystemExit: no licence",
    "advantage.function=bad.py:remembering": "the same batch has other advantages the second time",
    "loss.function=bad.py:raising": r"bad.py:raising raised:(?s:.*)bad.py(?s:.*)no attribute 'no_such_field'",
    "loss.function=bad.py:not_a_number": r"returned nan for a token \(logprobs -\d.*\) of row \d; divide by",
    "advantage.function=bad.py:logarithm": "an advantage is not finite",
    "advantage.function=bad.py:by_row": "shape",
    "advantage.function=bad.py:rewards_in_place": "modified",
    "advantage.function=bad.py:of_one_reward": r"KeyError: 'right'(?s:.*)\(batch: usual\)",
}


@pytest.mark.parametrize("override", COMPLAINTS)
def test_what_breaks_a_rule_is_refused_before_anything_is_started(here, override):
    config = load_checked("digits-grpo", [override]).config
    with pytest.raises(ConfigError, match=COMPLAINTS[override]):
        examine_dry(config)


SEVERAL = "reward.functions=[{name: right, function: digits, weight: 1}, {name: brief, function: digits, weight: 0.5}]"


def test_an_advantage_of_several_rewards_is_given_those_of_the_config(here):
    several = ["reward.function=null", SEVERAL]
    check_own_functions(load_checked("digits-grpo", [*several, "advantage.function=bad.py:of_one_reward"]).config)
    with pytest.raises(ConfigError, match=r"KeyError: 'score'(?s:.*)\(batch: usual\)"):
        check_own_functions(load_checked("digits-grpo", [*several, "advantage.function=bad.py:of_another"]).config)
    one = several[1].split(", {name: brief")[0] + "]"
    check_own_functions(
        load_checked("digits-grpo", [several[0], one, "advantage.function=bad.py:of_one_reward"]).config
    )
    with pytest.raises(ConfigError, match="KeyError: 'score'"):
        check_own_functions(load_checked("digits-grpo", ["advantage.function=bad.py:of_another"]).config)


REFUSED = {
    ("loss.function=mine.py:my_los",): r"has no function 'my_los'; did you mean 'my_loss'\? \(command line\)",
    ("loss.function=nothing.py:f",): "nothing.py does not exist",
    ("loss.function=bad.py:Loss",): "expected a plain function, found a class",
    ("loss.function=bad.py:waiting",): "expected a plain function, found an async function",
    ("loss.function=mine.py:my_loss", "loss.parameters.flor=0.1"): r"takes \(tokens, floor\), but is called with",
    ("loss.function=mine.py:my_loss", "loss.parameters.floor=low"): "it has floor: float, found 'low'",
    ("loss.function=mine.py:my_loss", "loss.parameters.floor=[1]"): r"loss.parameters.floor=\[1\] .* expected names",
    ("loss.name=own",): "loss.function: required, but not set",
    ("loss=gspo",): r"did you mean loss.name=gspo\?",
    ("loss=mine.py:my_loss",): r"did you mean loss.function=mine.py:my_loss\?",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_a_config_says_wrongly_of_a_function_is_seen_in_its_text(here, overrides):
    with pytest.raises(ConfigError, match=REFUSED[overrides]) as raised:
        load_checked("digits-grpo", overrides)
    assert len(raised.value.problems) == 1


def test_an_advantage_of_ones_own_is_not_for_a_recipe_with_a_critic(here):
    with pytest.raises(ConfigError, match=r"advantage.name='own' is not computed by recipe=ppo: set recipe=grpo"):
        load_checked("digits", ["advantage.function=mine.py:my_advantage"])


def test_a_run_names_the_very_file_from_any_working_directory_and_records_its_content(here):
    config = anchored(load_checked("mine.yaml").config)
    assert config.own_functions["loss"].function == f"{here}/mine.py:my_loss"
    before = external_inputs(config)
    assert before["loss.function"].keys() == {"mine.py:my_loss"}
    (here / "mine.py").write_text((here / "mine.py").read_text() + "# edited\n")
    assert before["advantage.function"] != external_inputs(config)["advantage.function"]


def test_the_functions_of_a_foreign_run_folder_are_not_run_unless_they_are_named(here, monkeypatch):
    run = create_run(load_checked("mine.yaml"))
    assert load_named(str(run.path), []).config.loss.name == "own"
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "of another user"))
    with pytest.raises(ConfigError) as raised:
        load_named(str(run.path), [])
    said = str(raised.value)
    assert f"loss.function ({here}/mine.py:my_loss) is code that {run.path} names" in said
    assert f"advantage.function ({here}/mine.py:my_advantage) is code" in said
    named = [f"{section}.function={here}/mine.py:my_{section}" for section in ("loss", "advantage")]
    assert load_named(str(run.path), named).config.loss.name == "own"


def test_a_loss_of_ones_own_may_learn_from_tokens_without_an_advantage(here):
    config = load_checked("mine.yaml").config
    assert not actor_loss_of(config).objective.needs_advantage
    assert torch.is_tensor(actor_loss_of(config).objective(CASES["no advantage"].tokens()).sum)
