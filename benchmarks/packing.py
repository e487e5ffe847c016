"""Packed microbatches against plain transformers' padded batches, on the same chats and model (1.5B), on one device.

    python benchmarks/packing.py gsm8k/sft_train.jsonl
    python benchmarks/packing.py gsm8k/sft_train.jsonl --tiny --sequences 16 --steps 1      check on a CPU

Three ways to train on the same sequences, bf16 compute on fp32 master weights under FSDP2 in all of them:
  packed     this package, microbatches of 4,096
  padded     plain transformers (sdpa), every sequence padded to 4,096
  longest    plain transformers (sdpa), batches of 32 padded to their longest
Prints one JSON line for each with non-pad tokens/s, then the throughput ratios next to the ratios of tokens computed,
which are the most that leaving out padding alone can give.
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

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_step import synchronize
from transformers import AutoModelForCausalLM
from workload import model_sizes, write_model

from automodel_rl import Engine, ModelHandle, OptimizerConfig, TokenSequence, pack, sft_loss
from automodel_rl.config import ModelConfig
from automodel_rl.data.chat import ChatTokenizer
from automodel_rl.data.messages import Chat
from automodel_rl.launch.process_group import join_process_group
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.quickstart.model import train_tokenizer

MICROBATCH_TOKENS, BATCH, LR = 4096, 32, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--sequences", type=int, default=512, help="a step; the fully padded way gets a sixteenth")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    device = join_process_group(1)
    sizes = model_sizes("W1", options.tiny)
    folder = Path(tempfile.mkdtemp()) / "model"
    write_model(folder, sizes)
    sequences = tokenize(Path(options.data), sizes["vocab_size"], options.sequences)
    few = sequences[: max(2, options.sequences // 16)]
    results = {
        "packed": measure(packed(folder), sequences, options.steps, device),
        "padded": measure(padded(folder, device, batch=1, width=MICROBATCH_TOKENS), few, options.steps, device),
        "longest": measure(padded(folder, device, batch=BATCH, width=None), sequences, options.steps, device),
    }
    for name, result in results.items():
        print(json.dumps({"way": name, **result}), flush=True)
    for name in ("padded", "longest"):
        speed = results["packed"]["tokens_per_second"] / results[name]["tokens_per_second"]
        tokens = results[name]["computed_per_token"] / results["packed"]["computed_per_token"]
        ratios = {
            "throughput_ratio": round(speed, 3),
            "token_ratio": round(tokens, 3),
            "share": round(speed / tokens, 3),
        }
        print(json.dumps({"packed_against": name, **ratios}), flush=True)
    os._exit(0)


def tokenize(path: Path, vocab_size: int, count: int) -> list[TokenSequence]:
    with path.open() as lines:
        records = [json.loads(line)["messages"] for line in lines]
    tokenizer = train_tokenizer([m["content"] for messages in records for m in messages], vocab_size)
    chat = ChatTokenizer(tokenizer, "all")
    return [chat(Chat(messages), str(path)) for messages in records[:count]]


Step = Callable[[list[TokenSequence]], int]
"""One optimizer step; returns the number of tokens computed, padding included."""


def packed(folder: Path) -> Step:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder)))
    engine = Engine(handle, OptimizerConfig(lr=LR, decay="constant"))

    def step(sequences: list[TokenSequence]) -> int:
        microbatches = pack(sequences, MICROBATCH_TOKENS, cost=handle.flops)
        engine.train_step(microbatches, sft_loss)
        return sum(microbatch.num_tokens for microbatch in microbatches)

    return step


def padded(folder: Path, device: torch.device, batch: int, width: int | None) -> Step:
    """The usual loop: right-padded batches, transformers' own loss, gradients accumulated over the step."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh(device.type, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=device.type == "cuda")

    def step(sequences: list[TokenSequence]) -> int:
        computed = 0
        num_targets = sum(int(s.loss_mask[1:].sum()) for s in sequences)
        starts = range(0, len(sequences), batch)
        for start in starts:
            group = sequences[start : start + batch]
            inputs = pad(group, width or max(map(len, group)), device)
            last = start == starts[-1]
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last)
            model(**inputs, use_cache=False, num_items_in_batch=num_targets).loss.backward()
            computed += inputs["input_ids"].numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return computed

    return step


def pad(sequences: list[TokenSequence], width: int, device: torch.device) -> dict[str, Tensor]:
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for place, sequence in enumerate(sequences):
        length = len(sequence)
        ids[place, :length], mask[place, :length] = sequence.input_ids, 1
        labels[place, :length] = torch.where(sequence.loss_mask, sequence.input_ids, -100)
    return {n: t.to(device) for n, t in {"input_ids": ids, "attention_mask": mask, "labels": labels}.items()}


def measure(step: Step, sequences: list[TokenSequence], steps: int, device: torch.device) -> dict[str, Any]:
    """Median of `steps` steps after two to warm up."""
    seconds = []
    for _ in range(steps + 2):
        synchronize(device)
        started = time.perf_counter()
        computed = step(sequences)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    tokens = sum(map(len, sequences))
    return {
        "tokens_per_second": round(tokens / statistics.median(seconds[2:]), 1),
        "computed_per_token": round(computed / tokens, 4),
        "spread_s": [round(min(seconds[2:]), 3), round(max(seconds[2:]), 3)],
    }


if __name__ == "__main__":
    main()
