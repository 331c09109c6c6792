"""A tiny model with a tied head, which is what vLLM on a CPU gets wrong after a reload."""

import os

import torch
import trl_setup
from transformers import Qwen3Config, Qwen3ForCausalLM

# Read when vLLM is imported: the engine in this process, and no compiling.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

ENGINE = {"kv_cache_memory_bytes": 64 << 20, "dtype": "float32", "enforce_eager": True}


def make(folder, vocabulary=None):
    """Save a random Qwen3 of 100,000 parameters and the tests' tokenizer; return the folder."""
    tokenizer = trl_setup.tiny()[1]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary or len(trl_setup.WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
