import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
