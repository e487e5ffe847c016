"""What writing a checkpoint costs training: steps without one, with one in the background, and with one that waits.

    torchrun --nproc-per-node 2 benchmarks/checkpoint.py W1 dp_shard=2
    python benchmarks/checkpoint.py W1 - --tiny --tokens 2048 --rounds 1          check the script on a CPU

Every round is a checkpoint and the steps after it, at least `--steps` and until it is written. The step right after it
is reported separately. bf16 compute, fp32 master weights and moments, 65,536 tokens a step and device in microbatches
of 8,192, the device synchronised at step edges. Prints one JSON line.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from workload import MICROBATCH_TOKENS, make_sequences, model_sizes, parse_layout, write_model

from automodel_rl import Engine, Microbatch, ModelHandle, OptimizerConfig, pack, sft_loss
from automodel_rl.checkpoint.folder import CONFIG
from automodel_rl.checkpoint.saver import CheckpointSaver
from automodel_rl.config import ModelConfig
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.parallel.host_collectives import any_rank

WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["W1", "W2"])
    parser.add_argument("layout")
    parser.add_argument("--tokens", type=int, default=65536, help="a step and device")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "automodel_rl_benchmarks"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    parallel, memory = parse_layout(options.layout)
    join_process_group(parallel.world_size)
    sizes, capacity = model_sizes(options.workload, options.tiny), 128 if options.tiny else MICROBATCH_TOKENS
    folder = Path(options.folder) / (options.workload + ("_tiny" if options.tiny else ""))
    if dist.get_rank() == 0 and not (folder / "config.json").is_file():
        write_model(folder, sizes)
    dist.barrier()
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder)), parallel, memory)
    engine = Engine(handle, OptimizerConfig(lr=1e-5, decay="constant"))
    generator = np.random.default_rng(0)
    sequences = make_sequences(options.tokens * parallel.world_size, sizes["vocab_size"], generator, capacity)
    share = handle.layout.data_share
    microbatches = pack(sequences, capacity, min_microbatches=parallel.pp, cost=handle.flops, share=share)
    savers = {
        True: CheckpointSaver(engine, {CONFIG: ""}, in_background=True),
        False: CheckpointSaver(engine, {CONFIG: ""}, in_background=False),
    }
    for _ in range(WARM_UP):
        timed_step(engine, microbatches)
    gc.collect()
    gc.freeze()  # as runs do
    out = Path(options.folder) / "checkpoint"
    rounds: dict[bool, list[Any]] = {in_background: [] for in_background in savers}
    plain: list[float] = []
    for number in range(options.rounds):
        plain += [timed_step(engine, microbatches) for _ in range(options.steps)]
        for in_background, saver in savers.items():
            if not in_background and number > 0:  # it takes long, and says the same every time
                continue
            rounds[in_background].append(one_round(engine, saver, microbatches, out / f"step_{number}", options.steps))
            shutil.rmtree(out, ignore_errors=True) if dist.get_rank() == 0 else None
            dist.barrier()
    if dist.get_rank() == 0:
        step = statistics.median(plain)
        result = {"layout": options.layout, "step_s": round(step, 3), "gib": rounds[True][0]["gib"]}
        for in_background, of_mode in rounds.items():
            median = {key: statistics.median(r[key] for r in of_mode[1:] or of_mode) for key in of_mode[0]}
            result["async" if in_background else "sync"] = {
                "blocked_s": round(median["blocked_s"], 3),
                "first_blocked_s": round(of_mode[0]["blocked_s"], 3),
                "step_with_save": round((median["blocked_s"] + median["first_step_s"]) / step, 3),
                "other_steps": round(median["other_step_s"] / step, 3),
                "slowest_step": round(median["slowest_step_s"] / step, 3),
                "written_after_s": round(median["written_after_s"], 1),
            }
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)  # a finished measurement must not wait for libraries to tear down


def timed_step(engine: Engine, microbatches: list[Microbatch]) -> float:
    synchronise()
    started = time.perf_counter()
    engine.train_step(microbatches, sft_loss)
    synchronise()
    return time.perf_counter() - started


def one_round(
    engine: Engine, saver: CheckpointSaver, microbatches: list[Microbatch], folder: Path, steps: int
) -> dict[str, float]:
    """Times of a checkpoint and of the steps beside it."""
    synchronise()
    started = time.perf_counter()
    assert saver.save(folder, {"step": engine.step}, {}) is None
    blocked = time.perf_counter() - started
    times: list[float] = []
    written_after = 0.0
    while len(times) < steps or not written_after:
        times.append(timed_step(engine, microbatches))
        if not written_after and any_rank([saver.is_done], engine.handle.layout)[0]:
            written_after = time.perf_counter() - started
    assert saver.wait() is None
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "blocked_s": blocked,
        "first_step_s": times[0],
        "other_step_s": statistics.median(times[1:]),
        "slowest_step_s": max(times[1:]),
        "written_after_s": written_after,
        "gib": round(size / 2**30, 2),
    }


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
