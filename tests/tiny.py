"""Tiny models and data, made at run time."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from automodel_rl.batch import TokenSequence

VOCAB = 128
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def save_tiny_model(
    folder: Path, family: str = "qwen3", *, tied: bool = False, num_layers: int = 4, dtype: torch.dtype = torch.float64
) -> None:
    """A checkpoint with livelier weights than the default initialisation, so that differences show."""
    config = CONFIGS[family](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1, generator=generator)
        else:
            nn.init.uniform_(parameter, 0.8, 1.2, generator=generator)
    model.to(dtype).save_pretrained(folder)


def make_sequences(num_sequences: int, seed: int, longest: int = 18) -> list[TokenSequence]:
    """Random sequences of different lengths with random loss masks, at least one trained token in each."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(num_sequences):
        length = int(torch.randint(3, longest, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.7
        mask[-1] = True
        sequences.append(TokenSequence(torch.randint(0, VOCAB, (length,), generator=generator), mask))
    return sequences
