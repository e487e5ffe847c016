"""The workloads of the benchmarks: W1, a dense 1.5B model, W2, a mixture of 3.2B, W8, some layers of a dense 8B model,
and tiny ones for a CPU."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_rl import ParallelConfig, TokenSequence
from automodel_rl.config.model import MemoryConfig

MICROBATCH_TOKENS = 8192
WORKLOADS: dict[str, dict[str, Any]] = {
    "W1": {
        "model_type": "qwen3",
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "W2": {
        "model_type": "qwen3_moe",
        "vocab_size": 32768,
        "hidden_size": 1536,
        "intermediate_size": 640,
        "moe_intermediate_size": 640,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
WORKLOADS["W8"] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def model_sizes(workload: str, tiny: bool) -> dict[str, Any]:
    """The config of a workload; tiny keeps the number of layers and of experts."""
    sizes = WORKLOADS[workload]
    return sizes | TINY | ({"moe_intermediate_size": 32} if workload == "W2" else {}) if tiny else sizes


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """A checkpoint with random weights (seed 0), untied, in bf16."""
    config = AutoConfig.for_model(
        **sizes,
        tie_word_embeddings=False,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=sizes["vocab_size"] - 1,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)


def make_sequences(
    num_tokens: int, vocab_size: int, generator: np.random.Generator, longest: int, skew: float = 1.0
) -> list[TokenSequence]:
    """Random tokens, all trained, in log-normal lengths: median 700, sigma 1, 64 to 8,192, scaled with `longest`.

    Args:
        num_tokens: at least this many in all.
        vocab_size: of the ids.
        generator: of all randomness.
        longest: longest sequence.
        skew: 1 for uniform ids; more makes low ids likelier, so that there is something to learn.
    """
    scale = longest / MICROBATCH_TOKENS
    sequences: list[TokenSequence] = []
    while num_tokens > 0:
        length = int(np.clip(generator.lognormal(math.log(700 * scale), 1.0), max(2, 64 * scale), longest))
        sequences.append(one_sequence(length, vocab_size, generator, skew))
        num_tokens -= length
    return sequences


def one_sequence(length: int, vocab_size: int, generator: np.random.Generator, skew: float = 1.0) -> TokenSequence:
    ids = torch.from_numpy((vocab_size * generator.random(length) ** skew).astype(np.int64))
    return TokenSequence(ids, torch.ones(length, dtype=torch.bool))


def parse_layout(text: str) -> tuple[ParallelConfig, MemoryConfig]:
    """`pp=2,schedule=GPipe,activation_checkpointing=full` as two sections of a config; `-` for one rank.

    A list is written with spaces: `layers_per_stage=[15 13]`.
    """
    values = {} if text == "-" else dict(pair.split("=") for pair in text.split(","))
    parsed = {key: yaml.safe_load(value.replace(" ", ",")) for key, value in values.items()}
    memory = {key: parsed.pop(key) for key in list(parsed) if key in MemoryConfig.model_fields}
    return ParallelConfig(**parsed), MemoryConfig(**memory)
