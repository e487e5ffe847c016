"""The cost of calling ranks from one program: `Policy.train_step` against the same step by `Engine.train_step`.

    python benchmarks/remote_calls.py W1                                   on one GPU
    torchrun --nproc-per-node 2 benchmarks/remote_calls.py W1 dp_shard=2
    python benchmarks/remote_calls.py W1 --tiny --tokens 2048              check on a CPU

Both train one model with one optimizer, in turn, on the same rows in the same microbatches, made before. Prints
a JSON line: median seconds of either, of the steps after the first four, and their ratio.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from workload import model_sizes, parse_layout, write_model

from automodel_rl import Batch, ModelHandle, OptimizerConfig, Policy, TokenSequence, sft_loss
from automodel_rl.batch import Packing
from automodel_rl.config import ModelConfig
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.policy.crew import POLICY, TreeCrew
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.policy.shares import Share

WARMUP = 4


class Rank(PolicyRank):
    """A rank that can also take a step as a script of SPMD ranks does."""

    def keep_rows(self, share: Share | None) -> None:
        """Keeps the rows, as microbatches."""
        self.microbatches = [] if share is None else share.pack()

    def step_by_engine(self) -> tuple[float, float]:
        """Seconds and loss of a step over the rows that were kept, on which the ranks agree."""
        return timed(lambda: self.engine.train_step(self.microbatches, sft_loss).loss)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def rows_of(tokens: int, vocab_size: int, generator: np.random.Generator, longest: int) -> Batch:
    """Rows of log-normal lengths (median 700, sigma 1), with all tokens in the loss."""
    rows: list[TokenSequence] = []
    while tokens > 64:
        n = int(np.clip(generator.lognormal(np.log(min(700, longest / 8)), 1.0), 64, min(longest, tokens)))
        rows.append(TokenSequence(torch.from_numpy(generator.integers(1, vocab_size - 1, n)), torch.ones(n).bool()))
        tokens -= n
    return Batch(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("layout", nargs="?", default="-")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, on each device")
    parser.add_argument("--capacity", type=int, default=16600)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    parallel, _ = parse_layout(options.layout)
    join_process_group(parallel.world_size)
    sizes = model_sizes(options.workload, options.tiny)
    folder = Path(tempfile.gettempdir()) / f"calls_{options.workload}{'_tiny' if options.tiny else ''}"
    if dist.get_rank() == 0 and not (folder / "config.json").is_file():
        write_model(folder, sizes)
    dist.barrier()
    device: dict[str, Any] = {} if torch.cuda.is_available() else {"dtype": "float32"}
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), **device), parallel)
    crew = TreeCrew(handle.layout, {POLICY: Rank(handle, None)})  # nothing is saved
    if crew.rank == 0:
        longest = 256 if options.tiny else 8192
        capacity = 600 if options.tiny else options.capacity
        policy = Policy(
            crew, Packing(capacity, parallel.num_data_ranks, parallel.pp, cost=handle.flops), sizes["vocab_size"]
        )
        print(json.dumps({"layout": str(parallel), **measure(policy, crew, options, sizes["vocab_size"], longest)}))
        crew.end()
    else:
        crew.follow()
    os._exit(0)


def measure(
    policy: Policy, crew: TreeCrew, options: argparse.Namespace, vocab_size: int, longest: int
) -> dict[str, Any]:
    policy.begin(OptimizerConfig(lr=1e-5, decay="constant", weight_decay=0.0))
    generator = np.random.default_rng(0)
    by_call: list[float] = []
    by_engine: list[float] = []
    losses: list[float] = []
    for number in range(options.steps):
        batch = rows_of(options.tokens * crew.size, vocab_size, generator, longest)
        crew.ask(POLICY, "keep_rows", shares=policy.shares(batch)[1])

        def by_calls(batch: Batch = batch) -> None:
            seconds, output = timed(lambda: policy.train_step(batch, sft_loss))
            by_call.append(seconds)
            losses.append(output.loss)

        def by_engines() -> None:
            by_engine.append(crew.ask(POLICY, "step_by_engine")[0])

        for take in (by_calls, by_engines) if number % 2 else (by_engines, by_calls):
            take()
    ours, theirs = (statistics.median(seconds[WARMUP:]) for seconds in (by_call, by_engine))
    return {
        "tokens": sum(batch.lengths),
        "rows": len(batch),
        "call_s": round(ours, 4),
        "engine_s": round(theirs, 4),
        "ratio": round(ours / theirs, 4),
        "loss": round(losses[-1], 4),
    }


if __name__ == "__main__":
    main()
