"""The dense 1.5B workload W1 of the benchmarks, and a tiny one to check the scripts on a CPU."""

import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from automodel_rl import TokenSequence

ROW_TOKENS = 8192
W1 = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def write_model(folder: Path, sizes: dict[str, int]) -> None:
    """A Qwen3 checkpoint with random weights (seed 0), untied, in bf16."""
    config = Qwen3Config(
        **sizes,
        tie_word_embeddings=False,
        max_position_embeddings=65536,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=sizes["vocab_size"] - 1,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)


def make_sequences(
    num_tokens: int, vocab_size: int, generator: np.random.Generator, longest: int
) -> list[TokenSequence]:
    """Random tokens, all trained, in log-normal lengths: median 700, sigma 1, 64 to 8,192, scaled with `longest`."""
    scale = longest / ROW_TOKENS
    sequences: list[TokenSequence] = []
    while num_tokens > 0:
        length = int(np.clip(generator.lognormal(math.log(700 * scale), 1.0), max(2, 64 * scale), longest))
        ids = torch.from_numpy(generator.integers(0, vocab_size, length))
        sequences.append(TokenSequence(ids, torch.ones(length, dtype=torch.bool)))
        num_tokens -= length
    return sequences
