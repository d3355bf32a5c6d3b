"""What is compared before a model is used: its sizes with its tokenizer and with the rows of a run."""

import pytest

from rallypoint.data import make_digits_tokenizer
from rallypoint.errors import ModelError
from rallypoint.models import create_model
from rallypoint.recipes.material import check_model
from rallypoint.recipes.use import Conversation, Trained


@pytest.fixture
def folder(tmp_path):
    """A model whose tokenizer has one id more than its embedding has rows."""
    tokenizer = make_digits_tokenizer()
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    create_model(
        tmp_path,
        tokenizer,
        architecture="llama",
        tie_embeddings=False,
        initializer_range=0.02,
        max_positions=64,
        seed=0,
        **sizes,
    )
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(folder):
    tokenizer = make_digits_tokenizer()
    check_model(folder, tokenizer, 64, trust_remote_code=False)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ModelError, match="the tokenizer has 21 ids, but the embedding only 20 rows; use the tokenizer"):
        check_model(folder, tokenizer, 64, trust_remote_code=False)
    with pytest.raises(ModelError, match="21 ids, but the embedding only 20 rows"):
        Conversation(Trained(folder, None), temperature=1.0, max_response_tokens=8, seed=0)


def test_rows_longer_than_the_model_supports_are_refused(folder):
    with pytest.raises(ModelError, match=r"supports rows of 64 tokens, but .* = 65; lower one"):
        check_model(folder, make_digits_tokenizer(), 65, trust_remote_code=False)
