"""The section of trackers may be given as the list of them."""

from pathlib import Path

from rallypoint.config import load_config


def test_a_list_of_trackers_stands_for_the_section_on_the_command_line_and_in_a_file(tmp_path: Path):
    for overrides in (["tracking=[wandb]", "tracking.names=verl"], ["tracking.names=verl", "tracking=wandb"]):
        loaded = load_config("digits", overrides)
        assert loaded.config.tracking is not None
        assert (loaded.config.tracking.to, loaded.config.tracking.names) == (("wandb",), "verl")
        assert loaded.origins["tracking.to"] == "command line"
    file = tmp_path / "tracked.yaml"
    file.write_text("base: digits\ntracking: [wandb, mlflow]\n")
    loaded = load_config(str(file), ["tracking.project=mine"])
    assert loaded.config.tracking is not None
    assert (loaded.config.tracking.to, loaded.config.tracking.project) == (("wandb", "mlflow"), "mine")
    assert loaded.origins["tracking.to"] == "tracked.yaml:2"
    assert load_config(str(file), ["tracking=null"]).config.tracking is None
