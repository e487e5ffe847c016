"""One optimizer step (forward, backward, clip, AdamW) on workload W1: non-pad tokens/s, MFU and peak memory.

    python benchmarks/train_step.py                                            one device
    torchrun --nproc-per-node 2 benchmarks/train_step.py --pp 2                two pipeline stages
    torchrun --nproc-per-node 2 benchmarks/train_step.py --dp-shard 2          FSDP2
    python benchmarks/train_step.py --tiny --tokens 2048 --steps 3             check the script on a CPU

Prints one JSON line. bf16 compute, fp32 master weights, clip 1.0, 65,536 tokens a step and GPU in packed rows of 8,192,
no activation checkpointing, no compilation. Median of `--steps` steps after 5 to warm up; the device is synchronised at
step edges only. The loss and gradient norm of the first step are printed too; `--reference` computes them with plain
transformers in fp32, one sequence at a time, on one device.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from workload import ROW_TOKENS, TINY, W1, make_sequences, write_model

from automodel_rl import Engine, ModelHandle, OptimizerConfig, ParallelConfig, TokenSequence, pack, sft_loss
from automodel_rl.config import ModelConfig
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.model.flops import peak_flops

WARMUP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--dp-shard", type=int, default=1)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--virtual-stages", type=int, default=1)
    parser.add_argument("--layers-per-stage", type=int, nargs="*")
    parser.add_argument("--tokens", type=int, default=65536, help="a step and device")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--implementation", default="transformers")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "automodel_rl_w1"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    parallel = ParallelConfig(
        pp=options.pp,
        schedule=options.schedule,
        virtual_stages=options.virtual_stages,
        layers_per_stage=options.layers_per_stage or None,
        dp_shard=options.dp_shard,
    )
    device = join_process_group(parallel.world_size)
    sizes, row = (TINY, 128) if options.tiny else (W1, ROW_TOKENS)
    folder = Path(options.folder + ("_tiny" if options.tiny else ""))
    if dist.get_rank() == 0 and not (folder / "config.json").is_file():
        write_model(folder, sizes)
    dist.barrier()
    generator = np.random.default_rng(0)
    tokens = options.tokens * parallel.world_size
    data = [make_sequences(tokens, sizes["vocab_size"], generator, row) for _ in range(WARMUP + options.steps)]
    if options.reference:
        result = reference(folder, data[0], device)
    else:
        model = ModelConfig(path=str(folder), dtype="bfloat16", implementation=options.implementation)
        result = measure(ModelHandle.from_pretrained(model, parallel), data, row)
    if dist.get_rank() == 0:
        print(json.dumps({**parallel.model_dump(exclude_defaults=True), **result}), flush=True)
    dist.barrier()
    os._exit(0)  # a finished measurement must not wait for libraries to tear down


def measure(handle: ModelHandle, data: list[list[TokenSequence]], row: int) -> dict[str, object]:
    engine = Engine(handle, OptimizerConfig(lr=1e-5, decay="constant"))
    layout = handle.layout
    seconds, outputs = [], []
    for sequences in data:
        batches = pack(
            sequences,
            row,
            num_data_ranks=layout.parallel.num_data_ranks,
            data_rank=layout.data_rank,
            min_bin_count=layout.parallel.pp * layout.parallel.num_data_ranks,
            cost=handle.flops,
        )
        synchronize(layout.device)
        started = time.perf_counter()
        outputs.append(engine.train_step(batches, sft_loss))
        synchronize(layout.device)
        seconds.append(time.perf_counter() - started)
    timed = slice(WARMUP, None)
    tokens = [sum(map(len, sequences)) for sequences in data][timed]
    flops = [sum(handle.flops(len(s)) for s in sequences) for sequences in data][timed]
    rates = [t / s / dist.get_world_size() for t, s in zip(tokens, seconds[timed], strict=True)]
    peak = peak_flops(layout.device)
    mfu = [f / s / dist.get_world_size() / peak for f, s in zip(flops, seconds[timed], strict=True)] if peak else None
    return {
        "tokens_per_second_per_device": round(statistics.median(rates), 1),
        "mfu_percent": round(100 * statistics.median(mfu), 2) if mfu else None,
        "peak_gib": peak_memory(layout.device),
        "step_s": round(statistics.median(seconds[timed]), 4),
        "spread_s": [round(min(seconds[timed]), 4), round(max(seconds[timed]), 4)],
        "loss1": round(outputs[0].loss, 5),
        "gnorm1": round(outputs[0].grad_norm, 5),
        "torch": torch.__version__,
    }


def reference(folder: Path, sequences: list[TokenSequence], device: torch.device) -> dict[str, object]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(device)
    num_targets = sum(len(s) - 1 for s in sequences)
    total = 0.0
    for sequence in sequences:
        ids = sequence.input_ids.to(device)
        loss = (
            torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum") / num_targets
        )
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return {"reference": True, "loss1": round(total, 5), "gnorm1": round(norm.item(), 5)}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> float | None:
    """Largest reserved memory of any rank in GiB."""
    if device.type != "cuda":
        return None
    peak = torch.tensor(torch.cuda.max_memory_reserved(device) / 2**30, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return round(peak.item(), 2)


if __name__ == "__main__":
    main()
