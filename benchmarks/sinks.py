"""Attention with sinks: a gpt-oss-shaped mixture of 3B, in microbatches of 32,768 tokens, one backend after the other.

    python benchmarks/sinks.py 4096 --attention eager varlen fa3      sequences of up to 4,096 tokens
    python benchmarks/sinks.py 32768 --attention eager varlen fa3     one sequence a microbatch
    python benchmarks/sinks.py 64 --tiny --attention eager            check the script on a CPU

Prints a JSON line for each backend: loss and gradient norm of the first step, median time of the steps after the third,
and peak memory. bf16, fp32 master weights, compiled layers, activations recomputed in full.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workload import TINY, make_sequences, one_sequence, write_model

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.config import MemoryConfig, ModelConfig
from automodel_rl.errors import MicrobatchError
from automodel_rl.launch.quiet import quiet_libraries

GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("longest", type=int, help="longest sequence, in tokens; the only length if all fits in one")
    parser.add_argument("--attention", nargs="+", default=["eager", "varlen", "fa3"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    folder = Path(tempfile.gettempdir()) / f"automodel_rl_sinks{'_tiny' if options.tiny else ''}"
    if not (folder / "config.json").is_file():
        write_model(folder, GPT_OSS | ({**TINY, "num_hidden_layers": 2} if options.tiny else {}))
    tokens = 64 if options.tiny else 32768
    for attention in options.attention:
        try:
            result = train(folder, attention, tokens, options)
        except MicrobatchError as error:
            result = {"failed": str(error)[:160]}
        print(json.dumps({"attention": attention, "longest": options.longest, **result}), flush=True)
        torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def train(folder: Path, attention: Any, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    model = ModelConfig(path=str(folder), attention=attention, dtype="bfloat16" if cuda else "float32")
    handle = ModelHandle.from_pretrained(model, memory=MemoryConfig(activation_checkpointing="full"))
    engine = Engine(handle, OptimizerConfig(lr=1e-5, decay="constant"))
    generator = np.random.default_rng(0)
    outputs, seconds = [], []
    for _ in range(options.steps):
        microbatches = pack(sequences_of(tokens, options.longest, handle.config.vocab_size, generator), tokens)
        started = time.perf_counter()
        outputs.append(engine.train_step(microbatches, sft_loss))  # it reads the loss, so the device is done
        seconds.append(time.perf_counter() - started)
    return {
        "loss": round(outputs[0].loss, 5),
        "grad_norm": round(outputs[0].grad_norm, 5),
        "seconds": round(statistics.median(seconds[3:] or seconds), 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else 0.0,
    }


def sequences_of(tokens: int, longest: int, vocab_size: int, generator: np.random.Generator) -> list[TokenSequence]:
    if longest == tokens:
        return [one_sequence(tokens, vocab_size, generator)]
    return make_sequences(tokens - longest, vocab_size, generator, longest)


if __name__ == "__main__":
    main()
