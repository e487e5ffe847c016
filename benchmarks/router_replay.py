"""What router replay adds to a training step of W2, a mixture of 3.2B.

    python benchmarks/router_replay.py -                                        one device
    python benchmarks/router_replay.py - activation_checkpointing=full compile=true
    torchrun --nproc-per-node 2 benchmarks/router_replay.py pp=2 dp_shard=2,ep=2
    python benchmarks/router_replay.py - --tiny --tokens 2048 --steps 2         check the script on a CPU

The routes are those that the model chooses by itself, and its weights hardly change, so that both ways run the same
experts on the same tokens. One batch is trained on with and without them, in turn, and the order alternates. Prints a
JSON line for each layout: medians of a step, their ratio, and the quartiles of the ratios of neighbouring steps.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from workload import MICROBATCH_TOKENS, make_sequences, model_sizes, parse_layout, write_model

from automodel_rl import Engine, ModelHandle, OptimizerConfig, pack, sft_loss
from automodel_rl.batch import Microbatch, Routes
from automodel_rl.block_sizes import block_sizes
from automodel_rl.config import ModelConfig
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="+", help="such as pp=2; - for one rank; without cp")
    parser.add_argument("--tokens", type=int, default=65536, help="a step and device")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    join_process_group(parse_layout(options.layouts[0])[0].world_size)
    sizes = model_sizes("W2", options.tiny)
    folder = Path(tempfile.gettempdir(), "automodel_rl_benchmarks", "W2_tiny" if options.tiny else "W2")
    if dist.get_rank() == 0 and not (folder / "config.json").is_file():
        write_model(folder, sizes)
    dist.barrier()
    for layout in options.layouts:
        result = measure(layout, folder, sizes["vocab_size"], options)
        if dist.get_rank() == 0:
            print(json.dumps({"layout": layout, **result}), flush=True)
    dist.barrier()
    os._exit(0)  # a finished measurement must not wait for libraries to tear down


def measure(layout: str, folder: Path, vocab_size: int, options: argparse.Namespace) -> dict[str, Any]:
    parallel, memory = parse_layout(layout)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder)), parallel, memory)
    engine = Engine(handle, OptimizerConfig(lr=1e-12, decay="constant"))
    generator, capacity = np.random.default_rng(0), 128 if options.tiny else MICROBATCH_TOKENS
    seconds: dict[bool, list[float]] = {False: [], True: []}
    differs = []
    sequences = make_sequences(options.tokens * dist.get_world_size(), vocab_size, generator, capacity)
    share = handle.layout.data_share
    microbatches = pack(sequences, capacity, min_microbatches=parallel.pp, cost=handle.flops, share=share)
    routed = with_own_routes(microbatches, engine)
    for step in range(options.warmup + options.steps):
        for replay in (False, True) if step % 2 else (True, False):
            if handle.layout.device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            output = engine.train_step(routed if replay else microbatches, sft_loss)
            if handle.layout.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[replay].append(time.perf_counter() - start)
            if replay:
                differs.append(output.metrics["replay/differs"])
    measured = {replay: values[options.warmup :] for replay, values in seconds.items()}
    ratios = [with_ / without for without, with_ in zip(measured[False], measured[True], strict=True)]
    return {
        "seconds_without": round(statistics.median(measured[False]), 4),
        "seconds_with": round(statistics.median(measured[True]), 4),
        "ratio": round(statistics.median(measured[True]) / statistics.median(measured[False]), 4),
        "ratio_quartiles": [round(quartile, 4) for quartile in statistics.quantiles(ratios, n=4)],
        "differs": round(statistics.median(differs), 4),
    }


def with_own_routes(microbatches: list[Microbatch], engine: Engine) -> list[Microbatch]:
    """The microbatches with the experts that this rank's layers choose for them."""
    # With more microbatches some would be freed, and others take their place in memory and so their id.
    assert len(microbatches) <= block_sizes.forward_microbatches
    handle, chosen = engine.handle, dict[tuple[int, int], torch.Tensor]()
    order: dict[int, int] = {}

    def note(number: int, scope: Any, output: tuple[torch.Tensor, ...]) -> None:
        place = order.setdefault(id(scope.microbatch), len(order))
        chosen[place, number] = output[2].short().cpu()

    hooks = [
        router.register_forward_hook(lambda _m, _i, output, n=n, e=extras: note(n, e.microbatch_scope, output))
        for extras in handle.extras
        for n, router in extras.router_watch.routers.items()
    ]
    engine.logprobs(microbatches)
    for hook in hooks:
        hook.remove()
    layers = handle.router_layers
    return [
        dataclasses.replace(microbatch, routes=Routes(layers, torch.stack([chosen[place, n] for n in layers], 1)))
        for place, microbatch in enumerate(microbatches)
    ]


if __name__ == "__main__":
    main()
