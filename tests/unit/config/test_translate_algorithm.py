"""Algorithms of verl and TRL as ours, and the names of others in the tables of docs/algorithms.md."""

import re
from pathlib import Path

import pytest

from rallypoint.config import load_config
from rallypoint.config.suggest import suggest_key
from rallypoint.config.translate import Translation, from_trl, from_verl

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def loaded(found: Translation, tmp_path: Path):
    (tmp_path / "translated.yaml").write_text(found.as_yaml())
    made = ["model.path=m", "data.train=d.jsonl", "reward.function=r.py:f", "rollout.group_size=4"]
    return load_config(str(tmp_path / "translated.yaml"), made).config


@pytest.mark.parametrize(
    ("theirs", "loss", "aggregation"),
    [
        ("loss_type='grpo'", {"name": "clip"}, "sequence"),
        ("loss_type='bnpo'", {"name": "clip"}, "token"),
        ("loss_type='dr_grpo', epsilon_high=0.28", {"name": "clip", "clip_high": 0.28}, "fixed_length"),
        ("loss_type='cispo', epsilon=0.2, epsilon_high=5.0", {"name": "cispo", "clip_low": 1, "clip_high": 4}, "token"),
        ("loss_type='sapo', sapo_temperature_neg=1.1", {"name": "sapo", "tau_negative": 1.1}, "sequence"),
        ("loss_type='sapo', epsilon_high=5.0", {"name": "sapo", "tau_positive": 1.0}, "sequence"),
    ],
)
def test_a_loss_type_of_trl_is_a_loss_with_its_bounds_or_an_aggregation(theirs, loss, aggregation, tmp_path):
    found = from_trl(f"GRPOConfig({theirs})")
    config = loaded(found, tmp_path)
    assert loss.items() <= config.loss.model_dump().items()
    assert config.aggregation == aggregation
    assert found.unknown == []


def test_a_loss_of_trl_without_a_counterpart_is_named():
    assert from_trl("GRPOConfig(loss_type='luspo')").unknown == ["loss_type=luspo"]


@pytest.mark.parametrize(("theirs", "aggregation"), [("", "token"), (", loss_type='grpo'", "sequence")])
def test_gspo_of_trl_is_a_mean_of_what_its_loss_type_says(theirs, aggregation, tmp_path):
    config = loaded(from_trl(f"GRPOConfig(importance_sampling_level='sequence'{theirs})"), tmp_path)
    assert (config.loss.name, config.aggregation) == ("gspo", aggregation)


TIS = {"name": "tis", "level": "token", "cap": 2.0}
ROWS = [{"name": "tis", "level": "sequence", "cap": 3.0}, {"name": "mask", "level": "product", "low": 0.0, "high": 3.0}]
VLLM, CORRECTION = "vllm_importance_sampling", "algorithm.rollout_correction.rollout"
CORRECTIONS = {
    f"{VLLM}_mode=token_truncate {VLLM}_cap=2.0": [TIS],
    f"{VLLM}_mode=token_mask {VLLM}_clip_min=0.5 {VLLM}_clip_max=5.0": [{"name": "icepop", "low": 0.5, "high": 5.0}],
    f"{VLLM}_mode=sequence_mask": ROWS,
    f"{VLLM}_correction=True": ROWS,
    f"{VLLM}_correction=False {VLLM}_cap=2.0": [],
    f"off_policy_mask_threshold=0.4 {VLLM}_correction=False": [{"name": "off_policy_mask", "delta": 0.4}],
    f"{CORRECTION}_is=token": [TIS],
    f"{CORRECTION}_is=null": [],
    f"{CORRECTION}_is=token {CORRECTION}_is_threshold=0.5_5.0": [{"name": "icepop", "low": 0.5, "high": 5.0}],
    f"{CORRECTION}_is=sequence {CORRECTION}_is_threshold=0.5_5.0": [
        {"name": "tis", "level": "sequence", "cap": 5.0},
        {"name": "mask", "level": "product", "low": 0.5, "high": 5.0},
    ],
    f"{CORRECTION}_rs=seq_mean_k1,seq_mean_k3 {CORRECTION}_rs_threshold=0.999_1.001,0.01": [
        {"name": "mask", "level": "geometric", "low": 0.999, "high": 1.001},
        {"name": "kl_mask", "estimator": "k3", "max_kl": 0.01},
    ],
    f"{CORRECTION}_is=token {CORRECTION}_rs=sequence {CORRECTION}_rs_threshold=4.0": [
        TIS,
        {"name": "mask", "level": "product", "low": 0.25, "high": 4.0},
    ],
}


@pytest.mark.parametrize("theirs", CORRECTIONS)
def test_corrections_are_lists_of_weights_and_masks(theirs, tmp_path):
    found = from_verl(f"adv_estimator=grpo {theirs}") if CORRECTION in theirs else from_trl(f"{theirs} use_vllm=True")
    assert [one.model_dump() for one in loaded(found, tmp_path).correction] == CORRECTIONS[theirs]
    assert found.unknown == []


def test_corrections_without_a_counterpart_are_named():
    theirs = "rollout_rs=seq_max_k3,token_k1 rollout_rs_threshold=2.0,0.5_2.0 bypass_mode=True rollout_is=rows"
    found = from_verl(theirs)
    assert found.unknown == [
        "rollout_is=rows, rollout_is_threshold=2.0",
        "rollout_rs=seq_max_k3, rollout_rs_threshold=2.0",
        "bypass_mode=True",
    ]
    assert found.keys["correction"] == [{"name": "mask", "level": "token", "low": 0.5, "high": 2.0}]


def tables() -> dict[str, list[list[str]]]:
    """Return the rows of each table of the page that has a column of others' names, by its heading."""
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in part.splitlines()
            if line[:1] == "|"
        ]
        if rows and rows[0][-1] == "verl / TRL / OpenRLHF":
            found[part.splitlines()[0]] = rows[2:]
    return found


@pytest.mark.parametrize("title", tables())
def test_every_row_says_where_it_is_from_and_when_to_use_it(title):
    for name, *others in tables()[title]:
        assert all(cell for cell in others), name
        assert len(others) == len(tables()[title][0]) - 1 >= 4


CONTEXT = {"KL to the reference": ("actor.use_kl_loss=True", "beta=0.1")}
OF_WORDS = {
    "Advantages": ("algorithm.adv_estimator", "scale_rewards", "advantage_estimator"),
    "Policy losses": ("policy_loss.loss_mode", "loss_type", "policy_loss_type"),
    "Sampler against trainer": ("rollout_rs", f"{VLLM}_mode", "vllm_is_correction_type"),
    "Aggregation": ("actor.loss_agg_mode", "loss_type", "loss_agg_mode"),
}
"""The key of theirs whose value a word in a table is, where it is no key."""
PREFIXES = ("actor", "algorithm")
"""Sections of verl's without which some keys are not unique."""
VALUES = ("0.3", "3.5", "3", "true")
"""Of which each key takes one."""
NOT_THEIRS = {"grpo_passk"}
"""Names in the tables of which the page says that they are something else."""


def names() -> list[tuple[str, str, int, str]]:
    """Return (table, ours, column, name) of each name in them."""
    found = []
    for title, rows in tables().items():
        for row in rows:
            columns = row[-1].split(" / ")
            for at, cell in enumerate(columns if len(columns) == 3 else ()):
                found += [(title, " ".join(row[:2]), at, name) for name in re.findall(r"`([^`]+)`", cell)]
    return [one for one in found if one[3] not in NOT_THEIRS]


def test_every_table_of_the_page_has_names_of_all_three():
    assert {title for title, *_ in names()} == {*OF_WORDS, *CONTEXT, "Shaping"}
    assert {(title, at) for title, _, at, _ in names()} >= {(title, at) for title in OF_WORDS for at in range(3)}


@pytest.mark.parametrize(("title", "ours", "at", "name"), names(), ids=lambda one: str(one)[:40])
def test_every_name_of_others_in_the_tables_is_understood(title, ours, at, name):
    word = OF_WORDS.get(title, ("", "", ""))[at]
    as_keys = [f"{name}={value}" for value in VALUES] if "=" not in name else [name.replace('"', "")]
    as_keys += [f"{prefix}.{key}" for prefix in PREFIXES for key in as_keys] if at == 0 else []
    written = [*as_keys, f"{word}={name}"] if word else as_keys
    if at == 2:
        said = [suggest_key(one.split("=")[0].split("."), one.partition("=")[2], "grpo") for one in written]
        assert any("did you mean" in one or "[{name:" in one for one in said), said
        return
    if name.endswith("Trainer"):
        assert from_trl(f"{name.replace('Trainer', 'Config')}(learning_rate=1e-6)").unknown == []
        return
    kind = "gae" if ours.startswith(("`critic", "`gae")) else "grpo"
    of_trl = "num_ppo_epochs=1" if kind == "gae" else "num_generations=8"
    translate, before = (from_verl, f"adv_estimator={kind}") if at == 0 else (from_trl, of_trl)
    context = "" if ours.startswith("`reward` `k1`") else CONTEXT.get(title, ("", ""))[at]
    before = f"{before} {context} {_beside(name)}"
    plain = translate(before).keys
    found = [translate(f"{before} {one}") for one in written]
    assert any(not one.unknown and (one.keys != plain or _is_default(name)) for one in found), (ours, found)


def _beside(name: str) -> str:
    """Return what their key needs to mean anything."""
    return (
        "use_vllm=True"
        if name.endswith(("_mask", "_truncate"))
        else "rollout_is=token"
        if "threshold" in name
        else "rollout_rs_threshold=0.5_2.0"
        if "_k" in name
        else ""
    )


def _is_default(name: str) -> bool:
    """Whether it is what both have unless told otherwise."""
    return name in {
        "gae",
        "grpo",
        "vanilla",
        "scale_rewards=group",
        "token-mean",
        "loss_type=dapo",
        "kl_loss_type=low_var_kl",
        "sequence_mask",
    }
