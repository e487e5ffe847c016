"""One optimizer step (forward, backward, clip, AdamW): non-pad tokens/s, MFU and peak memory of one or more layouts.

    python benchmarks/train_step.py W1 -                                              one device
    torchrun --nproc-per-node 2 benchmarks/train_step.py W1 pp=2 dp_shard=2 cp=2      one layout after the other
    torchrun --nproc-per-node 4 benchmarks/train_step.py W1 cp=4 --one-microbatch 131072
                                                                                      one sequence a step
    torchrun --nproc-per-node 4 benchmarks/train_step.py W1 pp=4 --microbatches 8     microbatches of equal cost
    torchrun --nproc-per-node 2 benchmarks/train_step.py W1 pp=2 --one-each padded    a microbatch for each sequence,
                                                                                      all as long as the longest
    python benchmarks/train_step.py W8 activation_checkpointing=offload,mlp_tile=4096 --layers 36 --lora plain \
        --one-microbatch 262144 --warmup 0 --steps 1                                  adapters, a long row
    python benchmarks/train_step.py W8 activation_checkpointing=offload,mlp_tile=4096 --layers 36 \
        --optimizer adamw_8bit --master-dtype bfloat16 --one-microbatch 65536 --warmup 0 --steps 1     all weights
    python benchmarks/train_step.py W1 - --profile                                    host syncs and reductions
    python benchmarks/train_step.py W1 - --kernels 20                                 kernel time by kind
    python benchmarks/train_step.py W1 - --tiny --tokens 2048 --steps 3               check the script on a CPU

Prints one JSON line for each layout. bf16 compute, fp32 master weights, clip 1.0, 65,536 tokens a step and GPU in
microbatches of 8,192, no activation checkpointing unless the layout says so. Median of `--steps`
steps after 5 to warm up; the device is synchronised at step edges only. Loss and gradient norm of the first step are
printed too, and `loaded_gib`, what is allocated before it; `--reference` computes them with plain transformers in fp32,
one sequence at a time, on one device.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from kernels import kernel_times
from transformers import AutoModelForCausalLM
from workload import (
    MICROBATCH_TOKENS,
    WORKLOADS,
    make_sequences,
    model_sizes,
    one_sequence,
    parse_layout,
    write_checkpoint,
)

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.batch import Microbatch, pack_microbatch
from automodel_rl.config import LoraConfig, ModelConfig
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.model.flops import peak_flops


def main() -> None:
    options = parse_arguments()
    quiet_libraries()
    parallel, _ = parse_layout(options.layouts[0])
    device = join_process_group(parallel.world_size)
    sizes, capacity = model_sizes(options.workload, options.tiny), 128 if options.tiny else MICROBATCH_TOKENS
    sizes["vocab_size"] = options.vocab or sizes["vocab_size"]
    sizes["num_hidden_layers"] = options.layers or sizes["num_hidden_layers"]
    name = f"{options.workload}{'_tiny' if options.tiny else ''}_{sizes['num_hidden_layers']}_{sizes['vocab_size']}"
    folder = Path(options.folder) / name
    if dist.get_rank() == 0 and not (folder / "config.json").is_file():
        write_checkpoint(options.workload, folder, sizes)
    dist.barrier()
    data, capacity = make_data(options, sizes["vocab_size"], capacity, dist.get_world_size())
    capacity = options.capacity or capacity
    if options.reference:
        report({"reference": True, **reference(folder, data[0], device)})
    for layout in [] if options.reference else options.layouts:
        try:
            report({"layout": layout, **measure(layout, folder, data, capacity, options)})
        except torch.OutOfMemoryError as error:
            report({"layout": layout, "out_of_memory": str(error)[:80]})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    os._exit(0)  # a finished measurement must not wait for libraries to tear down


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("layouts", nargs="+", help="such as pp=2,schedule=GPipe; - for one rank")
    parser.add_argument("--tokens", type=int, default=65536, help="a step and device")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--one-microbatch", type=int, help="each step is one sequence of this length")
    parser.add_argument(
        "--microbatches", type=int, help="microbatches a step and data rank, each one sequence of 8,192"
    )
    parser.add_argument(
        "--one-each", choices=["own", "padded"], help="a microbatch for each sequence, or as long as the longest"
    )
    parser.add_argument("--profile", action="store_true", help="count host synchronisations and reductions of a step")
    parser.add_argument("--kernels", type=int, help="kernel time of a step by kind, and so many single kernels")
    parser.add_argument("--capacity", type=int, help="tokens of a microbatch, 8,192 by default")
    parser.add_argument("--vocab", type=int, help="size of the vocabulary; the workload's by default")
    parser.add_argument("--layers", type=int, help="decoder layers; the workload's by default")
    parser.add_argument("--lora", choices=["plain", "nf4"], help="adapters of rank 16 on a base of this kind")
    parser.add_argument("--optimizer", choices=["adamw", "adamw_8bit", "muon"], default="adamw")
    parser.add_argument("--master-dtype", choices=["auto", "bfloat16"], default="auto", help="model.master_dtype")
    parser.add_argument("--implementation", default="transformers")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--fp8", choices=["rowwise", "tensorwise"], help="model.fp8; bf16 by default")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "automodel_rl_benchmarks"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--reference", action="store_true")
    return parser.parse_args()


def make_data(
    options: argparse.Namespace, vocab_size: int, capacity: int, world_size: int
) -> tuple[list[list[TokenSequence]], int]:
    """The sequences of every step, and the capacity of a microbatch."""
    generator = np.random.default_rng(0)
    steps = options.warmup + options.steps
    if options.one_microbatch:
        return [
            [one_sequence(options.one_microbatch, vocab_size, generator)] for _ in range(steps)
        ], options.one_microbatch
    if options.microbatches:
        data = [
            [one_sequence(capacity, vocab_size, generator) for _ in range(options.microbatches)] for _ in range(steps)
        ]
        return data, capacity
    tokens = options.tokens * world_size
    if options.one_each:
        data = [make_sequences(tokens, vocab_size, generator, capacity) for _ in range(steps)]
        return [[pad(s, step) for s in step] for step in data] if options.one_each == "padded" else data, capacity
    return [make_sequences(tokens, vocab_size, generator, capacity) for _ in range(steps)], capacity


def pad(sequence: TokenSequence, step: list[TokenSequence]) -> TokenSequence:
    """A sequence padded to the longest of its step. The padding is not trained."""
    missing = max(map(len, step)) - len(sequence)
    ids = torch.cat([sequence.input_ids, torch.zeros(missing, dtype=torch.int64)])
    return TokenSequence(ids, torch.cat([sequence.loss_mask, torch.zeros(missing, dtype=torch.bool)]))


def microbatches_of(
    sequences: list[TokenSequence], capacity: int, handle: ModelHandle, options: argparse.Namespace
) -> list[Microbatch]:
    if options.one_each:
        return [pack_microbatch([sequence]) for sequence in sequences]
    parallel = handle.layout.parallel
    return pack(
        sequences,
        capacity,
        share=handle.layout.data_share,
        min_microbatches=parallel.pp if len(sequences) > 1 else 1,
        cost=handle.flops,
    )


def measure(
    layout: str, folder: Path, data: list[list[TokenSequence]], capacity: int, options: argparse.Namespace
) -> dict[str, object]:
    parallel, memory = parse_layout(layout)
    model = ModelConfig(
        path=str(folder),
        implementation=options.implementation,
        attention=options.attention,
        fp8=options.fp8,
        lora=LoraConfig(base=options.lora) if options.lora else None,
        master_dtype=options.master_dtype,
    )
    handle = ModelHandle.from_pretrained(model, parallel, memory)
    engine = Engine(handle, OptimizerConfig(name=options.optimizer, lr=1e-5, decay="constant"))
    device = handle.layout.device
    loaded = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        loaded = torch.cuda.memory_allocated()
    seconds, outputs = [], []
    for sequences in data:
        microbatches = microbatches_of(sequences, capacity, handle, options)
        synchronize(device)
        started = time.perf_counter()
        outputs.append(engine.train_step(microbatches, sft_loss))
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    timed = slice(options.warmup, None)
    tokens = [sum(int(s.loss_mask.sum()) for s in sequences) for sequences in data][timed]
    flops = [sum(handle.flops(len(s)) for s in sequences) for sequences in data][timed]
    rates = [t / s / dist.get_world_size() for t, s in zip(tokens, seconds[timed], strict=True)]
    peak = peak_flops(device)
    mfu = [f / s / dist.get_world_size() / peak for f, s in zip(flops, seconds[timed], strict=True)] if peak else None
    return {
        "tokens_per_second_per_device": round(statistics.median(rates), 1),
        "mfu_percent": round(100 * statistics.median(mfu), 2) if mfu else None,
        "reserved_gib": largest(torch.cuda.max_memory_reserved() if device.type == "cuda" else 0, device),
        "allocated_gib": largest(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0, device),
        "loaded_gib": largest(loaded, device),
        "step_s": round(statistics.median(seconds[timed]), 4),
        "spread_s": [round(min(seconds[timed]), 4), round(max(seconds[timed]), 4)],
        "loss1": round(outputs[0].loss, 5),
        "gnorm1": round(outputs[0].grad_norm, 5),
        "first_step_s": round(seconds[0], 1),
        "torch": torch.__version__,
        **(count_events(engine, microbatches) if options.profile else {}),
        **(
            {}
            if options.kernels is None
            else kernel_times(lambda: engine.train_step(microbatches, sft_loss), options.kernels)
        ),
    }


def count_events(engine: Engine, microbatches: list[Microbatch]) -> dict[str, object]:
    """Counts of how often one step on rank 0 waits for the device and reduces gradients."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.train_step(microbatches, sft_loss)
    names = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item"]
    counts = {event.key: event.count for event in profile.key_averages()}
    reductions = sum(count for key, count in counts.items() if key.startswith("nccl:") and "reduce_scatter" in key)
    return {
        "microbatches": len(microbatches),
        **{name: counts.get(name, 0) for name in names},
        "reduce_scatters": reductions,
    }


def report(result: dict[str, object]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)


def reference(folder: Path, sequences: list[TokenSequence], device: torch.device) -> dict[str, object]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(device)
    num_targets = sum(len(s) - 1 for s in sequences)
    total = 0.0
    for sequence in sequences:
        ids = sequence.input_ids.to(device)
        logits = model(ids[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / num_targets
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return {"loss1": round(total, 5), "gnorm1": round(norm.item(), 5)}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def largest(num_bytes: int, device: torch.device) -> float:
    """The largest value of any rank, in GiB."""
    peak = torch.tensor(num_bytes / 2**30, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return round(peak.item(), 2)


if __name__ == "__main__":
    main()
