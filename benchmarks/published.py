"""Published weights: how many numbers a step changes, what that takes on disk, and how long writing and reading take.

    python benchmarks/published.py MODEL RECORDS.jsonl                      steps of SFT with AdamW, one process
    python benchmarks/published.py MODEL RECORDS.jsonl --lr 1e-6 1e-5       one learning rate after the other
    torchrun --nproc-per-node 2 benchmarks/published.py MODEL RECORDS.jsonl --parallel dp_shard=2

The model is trained with float32 masters, and published in bfloat16 after every step; a reader brings its tensors
to each version, and at the end the last one is read anew and compared with the model. The learning rate is constant.
Prints a JSON line for each learning rate, with medians over the steps after the first five, in which AdamW's moments
begin.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from workload import parse_layout

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.config import ModelConfig, ParallelConfig, WeightSyncConfig
from automodel_rl.families.known import language_config
from automodel_rl.hf.read import read_config
from automodel_rl.hf.tokenizer import load_tokenizer
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.weight_sync.published import PublishedWeights
from automodel_rl.weight_sync.publisher import Publisher

WARMUP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("records", type=Path, help="JSON lines of messages")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--optimizer", default="adamw", help="adamw_8bit where memory is short")
    parser.add_argument("--parallel", default="-")
    options = parser.parse_args()
    quiet_libraries()
    parallel, _ = parse_layout(options.parallel)
    join_process_group(parallel.world_size)
    sequences = read_sequences(options.model, options.records)
    for lr in options.lr:
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            found = measure(options, sequences, parallel, lr, Path(shared[0]) / "weights")
            if dist.get_rank() == 0:
                print(json.dumps({"lr": lr, **found}), flush=True)


def read_sequences(model: Path, records: Path) -> list[TokenSequence]:
    tokenizer = load_tokenizer(model, language_config(read_config(model)).vocab_size)
    with records.open() as lines:
        texts = [" ".join(str(m["content"]) for m in json.loads(line)["messages"]) for line in lines]
    ids = [torch.tensor(tokenizer.encode(text)[:2048]) for text in texts]
    return [TokenSequence(of_text, torch.ones(len(of_text), dtype=torch.bool)) for of_text in ids]


def measure(
    options: argparse.Namespace, sequences: list[TokenSequence], parallel: ParallelConfig, lr: float, folder: Path
) -> dict[str, float]:
    dtype: Any = "bfloat16" if torch.cuda.is_available() else "float32"
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(options.model), dtype=dtype), parallel)
    engine = Engine(handle, OptimizerConfig(name=options.optimizer, lr=lr, decay="constant"))
    publisher = Publisher(handle, folder, WeightSyncConfig(dtype="bfloat16"))
    reader, tensors = PublishedWeights(folder), dict[str, Tensor]()
    stream = itertools.cycle(sequences)
    rows: dict[str, list[float]] = {"changed_percent": [], "mib": [], "write_s": [], "read_s": []}
    whole = {"mib": 0.0, "write_s": 0.0, "read_s": 0.0}
    for step in range(options.steps):
        started = time.perf_counter()
        publisher.publish(step)
        written = time.perf_counter()
        if dist.get_rank() == 0:
            reader.load_version(tensors)
        read = time.perf_counter()
        numbers = {"mib": publisher.num_bytes / 2**20, "write_s": written - started, "read_s": read - written}
        if step == 0:
            whole = numbers
        elif step >= WARMUP:
            numbers["changed_percent"] = 100 * publisher.changed / handle.num_values
            for name, number in numbers.items():
                rows[name].append(number)
        engine.train_step(
            pack(next_batch(stream, options.tokens), options.tokens, share=handle.layout.data_share), sft_loss
        )
    publisher.publish(options.steps)
    differing = count_differing(handle, reader, tensors)
    medians = {name: round(statistics.median(values), 4) for name, values in rows.items() if values}
    return (
        medians
        | {"steps": options.steps, "differing": differing}
        | {f"whole_{name}": round(number, 3) for name, number in whole.items()}
    )


def count_differing(handle: ModelHandle, reader: PublishedWeights, tensors: dict[str, Tensor]) -> int:
    """How many numbers differ from the model's, of what the reader has and of what another one reads anew; 0 on all
    ranks but the first."""
    afresh = dict[str, Tensor]()
    if dist.get_rank() == 0:
        reader.load_version(tensors)
        PublishedWeights(reader.files).load_version(afresh)
    differing = 0
    for name, weights in handle.named_hf_tensors():  # gathers on all ranks
        if dist.get_rank() == 0:
            expected = weights.to(torch.bfloat16).cpu()
            differing += sum(int((held[name] != expected).sum()) for held in (tensors, afresh))
    return differing


def next_batch(stream: Iterator[TokenSequence], num_tokens: int) -> list[TokenSequence]:
    batch = [next(stream)]
    while sum(len(row.input_ids) for row in batch) < num_tokens:
        batch.append(next(stream))
    return batch


if __name__ == "__main__":
    main()
