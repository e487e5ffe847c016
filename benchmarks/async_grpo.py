"""Asynchronous against synchronous GRPO: the reward they reach, and the time that a step takes.

    automodel-rl quickstart FOLDER
    OMP_NUM_THREADS=1 python benchmarks/async_grpo.py FOLDER

The demo's GRPO on one rank, the generator in a process of its own on another core, once with rollout.max_staleness 0
and once with 1. The learning rate falls to 0: at a constant one, delay makes a policy that is near its best swing.
`--batch-size` is the generator's; choose it so that a rollout takes as long as the rest of a step. Prints a JSON line
for each run, with mean rewards of held-out prompts and the medians of the parts of a step.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from automodel_rl.launch.local import run_local_ranks
from automodel_rl.observe.metrics import read_lines

PARTS = ("time/rollout_s", "time/logprobs_s", "time/train_s", "time/sync_s", "time/step_s", "train/logprob_error")


def main() -> int:
    options = parse_arguments()
    results = [run(options, staleness) for staleness in (0, options.staleness)]
    for result in results:
        print(json.dumps(result))
    ratio = results[1]["time/step_s"] / results[0]["time/step_s"]
    print(json.dumps({"asynchronous / synchronous": round(ratio, 3)}))
    return 0


def run(options: argparse.Namespace, staleness: int) -> dict[str, Any]:
    output = Path(tempfile.mkdtemp(prefix="automodel_rl_async_")) / "run"
    keys = {
        "output": output,
        "parallel.pp": 1,
        "length.steps": options.steps,
        "length.validate_every": 5,
        "seed": options.seed,
        "rollout.generator": f"{{kind: transformers, place: shared, batch_size: {options.batch_size}}}",
        "rollout.max_staleness": staleness,
        "loss.correction.kind": "truncate",
        "optimizer.decay": "linear",
    }
    flags = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    code = run_local_ranks([sys.executable, "-m", "automodel_rl", "grpo", f"{options.folder}/grpo.yaml", *flags], 1)
    if code:
        sys.exit(code)
    first, *records = read_lines(output / "metrics.jsonl")
    held_out = [record["val/reward_mean"] for record in records if "val/reward_mean" in record]
    return {
        "max_staleness": staleness,
        "reward before": round(first["val/reward_mean"], 3),
        "reward after, every 5 steps": [round(reward, 3) for reward in held_out],
        "mean of the last 3": round(statistics.mean(held_out[-3:]), 3),
        "reward of the last 10 steps": round(
            statistics.mean(record["rollout/reward_mean"] for record in records[-10:]), 3
        ),
        "staleness": round(statistics.mean(record["rollout/staleness_mean"] for record in records[1:]), 2),
        **{part: round(statistics.median(record[part] for record in records[1:-1]), 3) for part in PARTS},
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="that `automodel-rl quickstart` has made")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
