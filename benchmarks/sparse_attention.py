"""Sparse attention with an indexer, on one GPU: against all keys and against the exact path.

    python benchmarks/sparse_attention.py                    2B as DeepSeek-V3.2 has it, 2,048 of 8,192 keys
    python benchmarks/sparse_attention.py --tiny --steps 2   check the script on a CPU

Random weights, rows of one sequence of skewed random tokens, every layer recomputed. Prints a JSON line for each way to
compute: medians after 3 steps, memory, and losses. "all keys" has the same weights and chooses none. The exact path is
float32.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8 import release_memory
from transformers import AutoConfig, AutoModelForCausalLM
from workload import one_sequence

from automodel_rl import Engine, ModelHandle, OptimizerConfig, pack, sft_loss
from automodel_rl.config import MemoryConfig, ModelConfig
from automodel_rl.launch.quiet import quiet_libraries

LARGE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "n_routed_experts": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "index_n_heads": 32,
}
SMALL = {
    **LARGE,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 64,
}
WAYS: dict[str, tuple[str, bool]] = {
    "chosen keys": ("bfloat16", True),
    "all keys": ("bfloat16", False),
    "chosen keys, exact": ("float32", True),
}
"""The dtype, and whether keys are chosen."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ways", nargs="+", default=[*WAYS])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    length, most = (256, 64) if options.tiny else (options.length, 2048)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {**(SMALL if options.tiny else LARGE), "index_topk": most, "max_position_embeddings": 65536}
        write_model(Path(folder), sizes)
        for way in options.ways:
            print(
                json.dumps({"way": way, "length": length, **train(Path(folder), way, length, options.steps)}),
                flush=True,
            )


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """A checkpoint with random weights (seed 0) in bf16."""
    config = AutoConfig.for_model("deepseek_v32", **sizes, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)


def train(folder: Path, way: str, length: int, steps: int) -> dict[str, Any]:
    """What was measured."""
    dtype, chooses = WAYS[way]
    cuda = torch.cuda.is_available()
    settings = folder / "config.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps({**values, "index_topk": values["index_topk"] if chooses else length}))
    if cuda:
        release_memory()
        torch.cuda.reset_peak_memory_stats()
    memory = MemoryConfig(activation_checkpointing="full", compile=False)
    model = ModelConfig(path=str(folder), dtype=dtype if cuda else "float32")  # type: ignore[arg-type]
    handle = ModelHandle.from_pretrained(model, memory=memory)
    settings.write_text(json.dumps(values))
    engine = Engine(handle, OptimizerConfig(lr=1e-6, decay="constant"))
    generator = np.random.default_rng(0)
    losses, rates = [], []
    for _ in range(steps):
        sequences = [one_sequence(length, handle.config.vocab_size, generator, skew=3.0) for _ in range(2)]
        microbatches = pack(sequences, length)
        started = time.perf_counter()
        losses.append(engine.train_step(microbatches, sft_loss).loss)  # it reads the loss, so the device is done
        rates.append(2 * length / (time.perf_counter() - started))
    return {
        "parameters": f"{sum(p.numel() for p in handle.parts[0].parameters()) / 1e9:.2f}B",
        "tokens_per_second": round(statistics.median(rates[3:] or rates)),
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else 0.0,
        "losses": [round(loss, 5) for loss in losses],
    }


if __name__ == "__main__":
    main()
