"""Models with a state or with heads of two sizes: kernels against the exact path, and their speed and memory.

    python benchmarks/hybrids.py nemotron_h                 3B as Nemotron-H has it: Mamba-2, MLPs, some attention
    python benchmarks/hybrids.py gemma4_text                3B as Gemma 4 has it: heads of 256 and of 512 dims
    python benchmarks/hybrids.py nemotron_h --tiny --steps 2   check the script on a CPU

Random weights, skewed random tokens, packed rows of 8,192 tokens, one optimizer step after two of them, every layer
recomputed. Prints a JSON line for each way to compute: medians after 3 steps, memory, the losses, and the largest
relative difference of a loss from the exact path's. The exact path is float32 with torch's attention, sequence by
sequence, and rules written out.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from fp8 import release_memory
from transformers import AutoConfig, AutoModelForCausalLM
from workload import make_sequences

from automodel_rl import Engine, ModelHandle, OptimizerConfig, pack, sft_loss
from automodel_rl.config import MemoryConfig, ModelConfig
from automodel_rl.launch.quiet import quiet_libraries

RESERVED = 3
"""Ids of special tokens, which do not occur."""

ROW = 8192
"""Tokens of a packed row."""

SHAPES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "vocab_size": 131072,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layers_block_type": ["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"],
        "repeats": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 80,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
    },
    "gemma4_text": {
        "vocab_size": 262144,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "repeats": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
}
"""Sizes of a config; the kinds of layers are repeated."""

TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "repeats": 1, "mamba_num_heads": 8}

WAYS = {
    "kernels": {"dtype": "bfloat16"},
    "rules written out": {"dtype": "bfloat16"},
    "torch's attention": {"dtype": "bfloat16", "attention": "sdpa"},
    "exact": {"dtype": "float32", "attention": "sdpa"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=[*WAYS])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    folder = Path(tempfile.gettempdir()) / f"automodel_rl_{options.family}{'_tiny' if options.tiny else ''}"
    if not (folder / "config.json").is_file():
        sizes = SHAPES[options.family]
        smaller = {key: size for key, size in TINY.items() if options.tiny and key in sizes}
        write_model(folder, options.family, sizes | smaller)
    found: dict[str, list[float]] = {}
    for way in options.ways:
        try:
            found[way], result = train(folder, way, options)
        except torch.OutOfMemoryError as error:
            result = {"error": str(error)[:120]}
        if way in found and "exact" in found and way != "exact":
            result["difference_of_loss"] = difference(found[way], found["exact"])
        print(json.dumps({"family": options.family, "way": way, **result}), flush=True)
    for way in found.keys() - {"exact"} if "exact" in found else ():
        print(json.dumps({"way": way, "difference_of_loss": difference(found[way], found["exact"])}), flush=True)


def write_model(folder: Path, family: str, sizes: dict[str, Any]) -> None:
    """A checkpoint with random weights (seed 0) in bf16."""
    kinds = next(key for key in ("layers_block_type", "layer_types") if key in sizes)
    repeated = {key: value for key, value in sizes.items() if key != "repeats"}
    repeated[kinds] = sizes[kinds] * sizes["repeats"]
    config = AutoConfig.for_model(
        family, **repeated, num_hidden_layers=len(repeated[kinds]), bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)


def train(folder: Path, way: str, options: argparse.Namespace) -> tuple[list[float], dict[str, Any]]:
    """The losses, and what was measured."""
    cuda = torch.cuda.is_available()
    if cuda:
        release_memory()
    asked: dict[str, Any] = WAYS[way] if cuda else {**WAYS[way], "dtype": "float32"}
    is_exact = asked["dtype"] == "float32"
    memory = MemoryConfig(activation_checkpointing="full", compile=False if is_exact else "auto")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    written = mock.patch("automodel_rl.model.token_mixers.mamba2.fast_kernels_obstacle", return_value="not asked for")
    with written if way != "kernels" else contextlib.nullcontext():
        handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), **asked), memory=memory)
    # Random weights are unstable at larger rates, and then no two ways give the same losses.
    engine = Engine(handle, OptimizerConfig(lr=1e-6, decay="constant"))
    generator, row = np.random.default_rng(0), 256 if options.tiny else ROW
    losses, norms, rates = [], [], []
    for _ in range(options.steps):
        sequences = make_sequences(2 * row, handle.config.vocab_size - RESERVED, generator, row // 2, skew=3.0)
        for sequence in sequences:
            sequence.input_ids.add_(RESERVED)  # a padding token's embedding is 0, and norms of zeros overflow
        microbatches = pack(sequences, row, cost=handle.flops)
        started = time.perf_counter()
        output = engine.train_step(microbatches, sft_loss)  # it reads the loss, so the device is done
        losses.append(output.loss)
        norms.append(output.grad_norm)
        rates.append(sum(map(len, sequences)) / (time.perf_counter() - started))
    parameters = sum(p.numel() for p in handle.parts[0].parameters())
    return losses, {
        "parameters": f"{parameters / 1e9:.2f}B",
        "tokens_per_second": round(statistics.median(rates[3:] or rates)),
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else 0.0,
        "losses": [round(loss, 5) for loss in losses],
        "gradient_norms": [round(norm, 3) for norm in norms],
    }


def difference(losses: list[float], exact: list[float]) -> float:
    """The largest relative difference of a loss."""
    return round(max(abs(ours / right - 1) for ours, right in zip(losses, exact, strict=True)), 6)


if __name__ == "__main__":
    main()
