import pytest
import torch
from tiny_models import TINY
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A small Llama with random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "model"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    return folder
