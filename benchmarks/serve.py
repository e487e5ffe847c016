"""The service against the library: time of the same optimizer steps of adapters.

    python benchmarks/serve.py --steps 25
    python benchmarks/serve.py --steps 3 --tiny            check the script on a CPU

W1 with adapters of rank 16, 65,536 tokens a step in about 64 sequences, microbatches of at most 16,384. The client is
tinker's, in this process; the service is another one on the same GPU. It is asked in two ways: a step at a time, and
with the next step sent before the results of this one are read. Prints a JSON line for each, and the ratios.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
import yaml
from tinker import types
from workload import TINY, WORKLOADS, make_sequences, write_model

from automodel_rl import (
    AdamWSettings,
    Engine,
    LoraConfig,
    ModelHandle,
    OptimizerConfig,
    TokenSequence,
    pack,
    token_loss,
)
from automodel_rl.config import ModelConfig
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.losses import UNDIVIDED
from automodel_rl.quickstart.model import train_tokenizer

RANK, CAPACITY, LEFT_OUT = 16, 16384, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    tokens = 1024 if options.tiny else options.tokens
    folder = Path(tempfile.gettempdir()) / f"automodel_rl_serve{'_tiny' if options.tiny else ''}"
    if not (folder / "tokenizer.json").is_file():
        write_model(folder, WORKLOADS["W1"] | (TINY if options.tiny else {}))
        train_tokenizer(["a few words"], 300).save_pretrained(folder)
    generator = np.random.default_rng(0)
    vocab = (WORKLOADS["W1"] | (TINY if options.tiny else {}))["vocab_size"]
    batches = [make_sequences(tokens, vocab, generator, tokens // 8) for _ in range(options.steps)]
    found = {
        **with_service(folder, batches),
        "library": report("library", library_step(folder), batches),
    }
    for name in ("service", "service_ahead"):
        print(json.dumps({name: round(found[name] / found["library"], 4)}), flush=True)


def report(name: str, step: Callable[[list[TokenSequence]], float], batches: list[list[TokenSequence]]) -> float:
    """Median seconds of a step."""
    seconds = []
    for batch in batches:
        started = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - started)
    return said(name, seconds, batches)


def said(name: str, seconds: list[float], batches: list[list[TokenSequence]]) -> float:
    left = seconds[LEFT_OUT:] or seconds
    median = statistics.median(left)
    tokens = statistics.fmean(sum(map(len, batch)) for batch in batches)
    print(
        json.dumps({"how": name, "seconds": round(median, 4), "tokens_per_second": round(tokens / median)}), flush=True
    )
    return median


def library_step(folder: Path) -> Callable[[list[TokenSequence]], float]:
    dtype: Any = "bfloat16" if torch.cuda.is_available() else "float32"
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype=dtype, lora=LoraConfig(rank=RANK)))
    engine = Engine(handle, OptimizerConfig(decay="constant"))
    loss = token_loss("cross_entropy", {})

    def step(batch: list[TokenSequence]) -> float:
        weighted = [
            TokenSequence(s.input_ids, torch.ones(len(s), dtype=torch.bool), {"weights": torch.ones(len(s))})
            for s in batch
        ]
        total, _ = engine.forward_backward(pack(weighted, CAPACITY, cost=handle.flops), loss, counts=UNDIVIDED)
        engine.optimizer_step(AdamWSettings(1e-4))
        return total

    return step


def with_service(folder: Path, batches: list[list[TokenSequence]]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as output:
        config = Path(output) / "serve.yaml"
        model = {"path": str(folder), "dtype": "bfloat16" if torch.cuda.is_available() else "float32"}
        config.write_text(
            yaml.safe_dump(
                {
                    "output": output,
                    "model": {**model, "lora": {"rank": RANK}},
                    "microbatch_tokens": CAPACITY,
                    "port": 0,
                }
            )
        )
        command = [sys.executable, "-m", "automodel_rl", "serve", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "TINKER_BASE_URL" in line)
            url, key = (word.partition("=")[2] for word in line.split()[1:])
            run = tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client(str(folder), rank=RANK)
            data = [[datum(sequence) for sequence in batch] for batch in batches]
            try:
                return of_service(run.result(), data, batches)
            finally:
                server.terminate()  # it saves the run
                server.wait()


def datum(sequence: TokenSequence) -> types.Datum:
    ids = sequence.input_ids.tolist()
    inputs: dict[str, Any] = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def of_service(run: Any, data: list[list[types.Datum]], batches: list[list[TokenSequence]]) -> dict[str, float]:
    adam = types.AdamParams(learning_rate=1e-4, eps=1e-8)
    seconds = []
    for batch in data:
        started = time.perf_counter()
        sent = run.forward_backward(batch, "cross_entropy"), run.optim_step(adam)
        for future in sent:
            future.result()
        seconds.append(time.perf_counter() - started)
    found = {"service": said("service", seconds, batches)}
    waiting: deque[Any] = deque()
    ends = []
    for batch in data:
        waiting.append((run.forward_backward(batch, "cross_entropy"), run.optim_step(adam)))
        if len(waiting) == 2:
            for future in waiting.popleft():
                future.result()
            ends.append(time.perf_counter())
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return {**found, "service_ahead": said("service, a step ahead", steps, batches)}


if __name__ == "__main__":
    main()
