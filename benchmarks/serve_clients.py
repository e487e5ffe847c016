"""Several clients of the service at once: runs that meet in one pass against runs that take turns.

    python benchmarks/serve_clients.py
    python benchmarks/serve_clients.py --tiny --rounds 2         check the script on a CPU

W1 with adapters of rank 64. Four clients train on batches of about 4,000 tokens each, and send each step without
waiting for the others. Runs of rank 16 share the model's adapters and can meet; those of rank 64 take turns. Prints a
JSON line for each: seconds of a round, in which every client takes one step, and how many passes were of several runs.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from serve_sampling import service
from tinker import types
from workload import TINY, WORKLOADS, write_model

from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.quickstart.model import train_tokenizer

CLIENTS, RANK, SEQUENCES, LENGTH, LEFT_OUT = 4, 64, 8, 500, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    sizes = WORKLOADS["W1"] | (TINY if options.tiny else {})
    folder = Path(tempfile.gettempdir()) / f"automodel_rl_clients{'_tiny' if options.tiny else ''}"
    if not (folder / "tokenizer.json").is_file():
        write_model(folder, sizes)
        train_tokenizer(["a few words"], 300).save_pretrained(folder)
    with service(folder, {"rank": RANK}, {"microbatch_tokens": 16384}) as client:
        for rank in (RANK // CLIENTS, RANK):
            print(json.dumps(measured(client, folder, rank, sizes["vocab_size"], options.rounds)), flush=True)


def measured(client: Any, folder: Path, rank: int, vocab_size: int, rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    runs = [client.create_lora_training_client(base_model=str(folder), rank=rank).result() for _ in range(CLIENTS)]
    batches = [[datum(random.integers(1, vocab_size, LENGTH + 1)) for _ in range(SEQUENCES)] for _ in runs]
    adam, seconds, before = types.AdamParams(learning_rate=1e-4), [], num_joint(client)
    for _ in range(rounds):
        started = time.perf_counter()
        sent = []
        for run, batch in zip(runs, batches, strict=True):
            sent += [run.forward_backward(batch, "cross_entropy"), run.optim_step(adam)]
        for future in sent:
            future.result()
        seconds.append(time.perf_counter() - started)
    return {
        "rank": rank,
        "seconds": round(statistics.median(seconds[LEFT_OUT:] or seconds), 3),
        "joint_passes": num_joint(client) - before,
    }


def datum(tokens: np.ndarray) -> types.Datum:
    inputs: Any = {"target_tokens": tokens[1:].tolist(), "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def num_joint(client: Any) -> int:
    """Passes of several runs, as the service's page says."""
    with urllib.request.urlopen(client.page) as page:
        found = re.search(r"(\d+) passes were of several runs", page.read().decode())
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
