"""What is said of an adapter that was made for another model than the one it is trained on."""

import json

from rallypoint.config import load_config
from rallypoint.prepare.model_folders import adapter_notes


def test_an_adapter_of_another_model_is_said_to_be_one(tmp_path):
    def notes(base: str | None, model: str) -> list[str]:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": base}))
        keys = ["model.create=null", f"model.path={model}", f"model.lora.path={tmp_path}"]
        return [*adapter_notes(load_config("digits-grpo", keys).config)]

    (ours := tmp_path / "ours").mkdir()
    (theirs := tmp_path / "theirs").mkdir()
    said = f"the adapter of model.lora.path was made for {theirs}, and model.path is {ours}"
    assert notes(str(theirs), str(ours)) == [said]
    assert len(notes("Some/Model-Base", "Some/Model")) == 1
    assert notes(str(ours), f"{tmp_path}/theirs/../ours") == [], "the same folder"
    assert notes("Some/Model", str(ours)) == [], "which may be a copy of it"
    assert notes(None, str(ours)) == []
