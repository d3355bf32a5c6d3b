"""What config.json says of the shape of a model."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from rallypoint.config.shape import read_shape
from rallypoint.families import FAMILIES


@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_matrix_or_two_for_embedding_and_head_is_what_the_family_means_where_config_json_is_silent(
    tmp_path: Path, model_type: str
):
    sizes = {"num_attention_heads": 4, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 9, **sizes}))
    shape = read_shape(tmp_path)
    assert shape is not None
    assert shape.tie_embeddings == AutoConfig.from_pretrained(tmp_path).tie_word_embeddings


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", "{}", '{"text_config": []}', '{"hidden_size": "wide"}', '{"text_config": {"hidden_size": 8}}',
        '{"hidden_size": 8, "num_attention_heads": 0, "num_hidden_layers": 1, "intermediate_size": 1, "vocab_size": 1}',
    ],
)  # fmt: skip
def test_a_config_json_of_another_kind_gives_no_shape_and_no_crash(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    assert read_shape(tmp_path) is None
