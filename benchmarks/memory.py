"""Memory of log-probabilities over a large vocabulary, and the time of a swap of reference weights, on one device.

    python benchmarks/memory.py
    python benchmarks/memory.py --vocabulary 32768    W1 as it is
    python benchmarks/memory.py --tiny                check the script on a CPU

W1 with a vocabulary of 151,936. 65,536 tokens in microbatches of 8,192: forward-only, then a training step. Prints how
much the peak adds to what was allocated before. The naive logits would take 37 GiB in fp32.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from workload import model_sizes, write_model

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.launch.quiet import quiet_libraries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    tiny = options.tiny
    quiet_libraries()
    folder = Path(tempfile.mkdtemp(prefix="automodel_rl_memory_"))
    sizes = model_sizes("W1", tiny) | ({} if tiny else {"vocab_size": options.vocabulary})
    write_model(folder, sizes)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32" if tiny else "bfloat16"))
    engine = Engine(handle, OptimizerConfig(lr=1e-6, decay="constant"))
    length, count = (128, 2) if tiny else (8192, 8)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, sizes["vocab_size"], (length,), generator=generator) for _ in range(count)]
    microbatches = [pack_microbatch([TokenSequence(i, torch.ones(length, dtype=torch.bool))]) for i in ids]
    engine.logprobs(microbatches[:1])
    print(json.dumps({"forward_only_gib": added(lambda: engine.logprobs(microbatches)), "allocated_gib": allocated()}))
    engine.train_step(microbatches[:1], sft_loss)
    print(
        json.dumps(
            {"training_gib": added(lambda: engine.train_step(microbatches, sft_loss)), "allocated_gib": allocated()}
        )
    )
    reference = ReferenceWeights(handle)
    seconds: list[list[float]] = [[], []]
    for _ in range(4):
        started = time.perf_counter()
        with reference.in_place():
            inside = time.perf_counter()
        seconds[0].append(inside - started)
        seconds[1].append(time.perf_counter() - inside)
    weights = sum(p.numel() for _, p in handle.named_parameters())
    gathered = weights * 2 / 2**30  # bf16 copies that FSDP keeps during a step; part of what both peaks add
    there, back = (statistics.median(values[1:]) for values in seconds)
    print(json.dumps({"parameters": weights, "gathered_gib": gathered, "swap_in_s": there, "swap_back_s": back}))


def added(work) -> float:  # type: ignore[no-untyped-def]
    """GiB that the peak of `work` adds to what is allocated before."""
    if not torch.cuda.is_available():
        work()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def allocated() -> float:
    return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


if __name__ == "__main__":
    main()
