"""Losses of the first 20 steps in bf16 on one layout after the other, against those of one device.

    python benchmarks/layouts.py W1 - --save losses.json
    torchrun --nproc-per-node 4 benchmarks/layouts.py W1 pp=4 dp_shard=4 cp=4 --against losses.json
    torchrun --nproc-per-node 2 benchmarks/layouts.py W1 pp=2 cp=2 --tiny --tokens 2048     check on a CPU

Every layout trains on the same global batches of skewed random tokens, in microbatches of 8,192. Prints one JSON line
for each with the largest relative difference of any step's loss.
"""

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from workload import MICROBATCH_TOKENS, make_sequences, model_sizes, parse_layout, write_model

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.config import ModelConfig
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["W1", "W2"])
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, on all devices together")
    parser.add_argument("--save")
    parser.add_argument("--against")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "automodel_rl_benchmarks"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    join_process_group(parse_layout(options.layouts[0])[0].world_size)
    sizes, capacity = model_sizes(options.workload, options.tiny), 128 if options.tiny else MICROBATCH_TOKENS
    folder = Path(options.folder) / (options.workload + ("_tiny" if options.tiny else ""))
    if dist.get_rank() == 0 and not (folder / "config.json").is_file():
        write_model(folder, sizes)
    dist.barrier()
    generator = np.random.default_rng(0)
    data = [make_sequences(options.tokens, sizes["vocab_size"], generator, capacity, 6.0) for _ in range(options.steps)]
    expected = json.loads(Path(options.against).read_text()) if options.against else None
    for layout in options.layouts:
        losses = train(layout, folder, data, capacity)
        if dist.get_rank() == 0:
            result = {"layout": layout, "first": round(losses[0], 4), "last": round(losses[-1], 4)}
            if expected is not None:
                worst = max(abs(a - e) / e for a, e in zip(losses, expected, strict=True))
                result["largest_relative_difference"] = f"{worst:.1e}"
            print(json.dumps(result), flush=True)
            if options.save:
                Path(options.save).write_text(json.dumps(losses))
    dist.barrier()
    os._exit(0)  # a finished measurement must not wait for libraries to tear down


def train(layout: str, folder: Path, data: list[list[TokenSequence]], capacity: int) -> list[float]:
    parallel, memory = parse_layout(layout)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder)), parallel, memory)
    engine = Engine(handle, OptimizerConfig(lr=1e-4, warmup_steps=3, decay="constant"))
    losses = []
    for sequences in data:
        microbatches = pack(
            sequences,
            capacity,
            share=handle.layout.data_share,
            cost=handle.flops,
        )
        losses.append(engine.train_step(microbatches, sft_loss).loss)
    del engine, handle
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return losses


if __name__ == "__main__":
    main()
