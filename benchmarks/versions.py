"""Whole sft runs by several versions of this package, in turn: each by its command line, from text to metrics.

    python benchmarks/versions.py W1 BEFORE NOW                     two checkouts, on one GPU
    python benchmarks/versions.py W1 BEFORE NOW --gpus 2            dp_shard 2
    python benchmarks/versions.py W1 . . --tiny                     check on a CPU

Chats have log-normal lengths (median 700 tokens). Every version trains the same steps with the same settings, twice, in
the order A B B A. Prints a JSON line for each run, then the ratio of the median times of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml
from workload import model_sizes, write_model

from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.quickstart.model import train_tokenizer

WARMUP = 4
WORDS = 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("trees", nargs=2, type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--capacity", type=int, default=16600)
    parser.add_argument("--sequences", type=int, default=60, help="of a step, for each device")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    quiet_libraries()
    folder = Path(tempfile.mkdtemp(prefix="versions_"))
    prepare(folder, options)
    one, other = (tree.absolute() for tree in options.trees)
    seconds: dict[Path, list[float]] = {one: [], other: []}
    for number, tree in enumerate((one, other, other, one)):
        records = run(tree, folder, options, number)
        seconds[tree] += [record["time/step_s"] for record in records]
        shown = {
            key: statistics.median(r[key] for r in records) for key in ("time/step_s", "time/data_s", "time/train_s")
        }
        print(json.dumps({"tree": str(tree), **shown, "loss": records[-1]["train/loss"]}), flush=True)
    medians = [statistics.median(seconds[tree]) for tree in (one, other)]
    print(json.dumps({"ratio": round(medians[1] / medians[0], 4)}))


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """A checkpoint with a tokenizer, and chats."""
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice([*"aeioustrnlm"], size=generator.integers(3, 8))) for _ in range(WORDS)]
    median = 40 if options.tiny else 600
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(options.sequences * options.gpus * options.steps):
            count = int(np.clip(generator.lognormal(np.log(median), 1.0), 16, 100 if options.tiny else 6000))
            text = " ".join(generator.choice(words, size=count))
            turns = [{"role": "user", "content": text[:60]}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")
    sizes = model_sizes(options.workload, options.tiny) | {"vocab_size": 32768}
    write_model(folder / "model", sizes)
    train_tokenizer([" ".join(words)] * 4, 8192).save_pretrained(folder / "model")


def run(tree: Path, folder: Path, options: argparse.Namespace, number: int) -> list[dict[str, float]]:
    """The metrics of the steps after the first few of a run."""
    output = folder / f"run_{number}"
    config = {
        "algorithm": "sft",
        "output": str(output),
        "model": {"path": str(folder / "model")} | ({"dtype": "float32"} if options.tiny else {}),
        "data": {"train": [{"path": str(folder / "chats.jsonl")}]},
        "batch": {
            "sequences": options.sequences * options.gpus,
            "microbatch_tokens": 1024 if options.tiny else options.capacity,
        },
        "length": {"steps": options.steps},
        "parallel": {"dp_shard": options.gpus},
        "checkpoint": {"every_steps": None},
        "observe": {"samples": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "automodel_rl", "sft", str(folder / "config.yaml")]
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{tree}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][WARMUP:]


if __name__ == "__main__":
    main()
