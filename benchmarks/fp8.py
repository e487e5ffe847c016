"""fp8 against bf16: losses, speed and memory of the same steps.

    python benchmarks/fp8.py 3B --steps 200           bf16, rowwise and tensorwise, one after the other
    python benchmarks/fp8.py 8B --steps 12 --offload   with the optimizer's moments on the host
    python benchmarks/fp8.py 1.5B --tiny --recipes none   check the script on a CPU

Dense Qwen3 shapes with random weights; skewed random tokens, so that there is something to learn; 32,768 tokens a step
in microbatches of at most 16,384, learning rate 1e-4. Prints a JSON line for each recipe: medians after 5 steps, the
first and last loss, and the largest relative difference of a loss, averaged over 10 steps, from bf16's.
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
from workload import TINY, WORKLOADS, make_sequences, write_model

from automodel_rl import Engine, ModelHandle, OptimizerConfig, pack, sft_loss
from automodel_rl.config import MemoryConfig, ModelConfig
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.model.flops import peak_flops

SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {},
    "3B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 30, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Changes of W1's config."""

AVERAGED = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipes", nargs="+", default=["none", "rowwise", "tensorwise"])
    parser.add_argument("--tokens", type=int, default=32768, help="of a step")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    folder = Path(tempfile.gettempdir()) / f"automodel_rl_fp8_{options.shape}{'_tiny' if options.tiny else ''}"
    if not (folder / "config.json").is_file():
        write_model(folder, WORKLOADS["W1"] | SHAPES[options.shape] | (TINY if options.tiny else {}))
    exact: list[float] = []
    for recipe in options.recipes:
        losses, result = train(folder, None if recipe == "none" else recipe, options)
        exact = exact or losses
        pairs = zip(averages(losses), averages(exact), strict=True)
        result["largest_difference_of_loss"] = round(max(abs(ours / right - 1) for ours, right in pairs), 5)
        print(json.dumps({"shape": options.shape, "recipe": recipe, **result}), flush=True)


def train(folder: Path, recipe: Any, options: argparse.Namespace) -> tuple[list[float], dict[str, Any]]:
    cuda = torch.cuda.is_available()
    if cuda:
        release_memory()
    model = ModelConfig(path=str(folder), fp8=recipe, dtype="bfloat16" if cuda else "float32")
    handle = ModelHandle.from_pretrained(model, memory=MemoryConfig(offload_optimizer=options.offload))
    engine = Engine(handle, OptimizerConfig(lr=1e-4, decay="constant", warmup_steps=10))
    generator, tokens = np.random.default_rng(0), 512 if options.tiny else options.tokens
    losses, rates, mfu = [], [], []
    for _ in range(options.steps):
        sequences = make_sequences(tokens, handle.config.vocab_size, generator, tokens // 4, skew=3.0)
        microbatches = pack(sequences, min(tokens, 16384), cost=handle.flops)
        started = time.perf_counter()
        losses.append(engine.train_step(microbatches, sft_loss).loss)  # it reads the loss, so the device is done
        seconds = time.perf_counter() - started
        rates.append(sum(map(len, sequences)) / seconds)
        mfu.append(sum(handle.flops(len(s)) for s in sequences) / seconds / (peak_flops(handle.layout.device) or 1e12))
    return losses, {
        "tokens_per_second": round(statistics.median(rates[5:] or rates)),
        "bf16_mfu_percent": round(100 * statistics.median(mfu[5:] or mfu), 1),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1) if cuda else 0.0,
        "loss_first": round(losses[0], 4),
        "loss_last": round(losses[-1], 4),
    }


def release_memory() -> None:
    """Gives back what the recipe before kept, its graphs included."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def averages(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[start : start + AVERAGED]) for start in range(0, len(losses), AVERAGED)]


if __name__ == "__main__":
    main()
