"""The workloads of the benchmarks: W1, a dense 1.5B model, W2, a mixture of 3.2B, W8 and W30, 12 layers of a dense 8B
model and of a mixture of 30B, W32 and W70, dense models of 32B and 70B in nf4, and tiny ones for a CPU."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

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

WORKLOADS["W32"] = WORKLOADS["W8"] | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
WORKLOADS["W70"] = WORKLOADS["W8"] | {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
WORKLOADS["W30"] = WORKLOADS["W2"] | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_experts": 128,
}
IN_NF4 = ("W32", "W70")
"""Workloads whose checkpoints are in nf4: in bf16 they are larger than most disks of a machine with one GPU."""

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
    return sizes | TINY | ({"moe_intermediate_size": 32} if "moe_intermediate_size" in sizes else {}) if tiny else sizes


def write_checkpoint(workload: str, folder: Path, sizes: dict[str, Any]) -> None:
    """A checkpoint of a workload's model with random weights (seed 0), untied, in bf16 or in nf4."""
    (write_nf4_model if workload in IN_NF4 else write_model)(folder, sizes)


def _config(sizes: dict[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(
        **sizes,
        tie_word_embeddings=False,
        max_position_embeddings=262144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=sizes["vocab_size"] - 1,
    )


def write_nf4_model(folder: Path, sizes: dict[str, Any]) -> None:
    """A checkpoint whose linear layers bitsandbytes has quantized to nf4, scales again, in a file for each layer."""
    from bitsandbytes.functional import quantize_4bit

    config, device = _config(sizes), "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        tensors = files.setdefault(".".join(name.split(".")[:3]), {})
        if parameter.ndim == 1:
            tensors[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
            continue
        weight = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.bfloat16) * 0.02
        if ".layers." not in name:
            tensors[name] = weight.cpu()
            continue
        codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        tensors[name] = codes.cpu()
        tensors |= {f"{name}.{key}": part.cpu() for key, part in state.as_dict(packed=True).items()}
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for place, tensors in enumerate(files.values()):
        file = f"model-{place + 1:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.dtype = torch.bfloat16
    values = config.to_dict() | {
        "architectures": [type(model).__name__],
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_use_double_quant": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(values, default=str))


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """A checkpoint with random weights (seed 0), untied, in bf16."""
    config = _config(sizes)
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
