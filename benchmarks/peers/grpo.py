"""GRPO by this package and by TRL, one after the other on one GPU: the same model, prompts, reward and settings.

    python benchmarks/peers/grpo.py MODEL TRAIN.jsonl --vllm-python PYTHON --held-out HELD_OUT.jsonl
    python benchmarks/peers/grpo.py MODEL TRAIN.jsonl --vllm-python PYTHON --steps 5 --seeds 0     times alone

PYTHON is an environment with vLLM and TRL, which has vLLM in its own process. Files have `prompt` (messages) and
`answer`; the reward is 1 if the completion's last number is the answer. Each run is a process of
its own; with --devices 0 1 2 each of these GPUs takes one run after the other. Prints a line for each run (seconds,
memory, accuracy on held-out prompts of the model it exports) and the table; with --picture FILE.png also the curves of
rewards.
"""

import argparse
import itertools
import json
import math
import os
import queue
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = ("ours", "trl")
LONGEST_PROMPT = 192

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a completion")
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--of-device", type=int, default=64, help="completions of TRL's microbatch")
    parser.add_argument("--replicas", type=int, default=1, help="vLLM replicas of this package on the device")
    parser.add_argument("--devices", nargs="+", default=["0"], help="GPUs, with a run at a time on each")
    parser.add_argument("--output", type=Path, default=None, help="a folder for lines of all runs")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="peers_grpo_"))
    folder.mkdir(parents=True, exist_ok=True)
    free, runs = queue.Queue[str](), list[Record]()
    for device in options.devices:
        free.put(device)

    def run_next(seed: int, peer: str) -> None:
        device = free.get()
        run = one_run(peer, seed, device, folder / f"{peer}_{seed}", options)
        free.put(device)
        print(json.dumps({key: value for key, value in run.items() if key != "steps"}), flush=True)
        runs.append(run)
        (folder / "runs.json").write_text(json.dumps(runs))

    with ThreadPoolExecutor(len(options.devices)) as threads:
        list(threads.map(run_next, *zip(*itertools.product(options.seeds, options.peers), strict=True)))
    print(table(runs))
    if options.picture:
        draw(runs, options.picture)


def one_run(peer: str, seed: int, device: str, output: Path, options: argparse.Namespace) -> Record:
    """A run of one of the packages on a GPU, and what it reached."""
    output.mkdir(parents=True, exist_ok=True)
    command = (ours if peer == "ours" else trl)(seed, output, options)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    peak, ended = [0.0], threading.Event()
    threading.Thread(target=watch_memory, args=(device, peak, ended), daemon=True).start()
    started = time.monotonic()
    code, lines = run_with_times(command, environment, output / "log.txt")
    seconds = time.monotonic() - started
    ended.set()
    if code:
        return {"peer": peer, "seed": seed, "failed": (output / "log.txt").read_text()[-400:]}
    steps, exported = (steps_of_ours if peer == "ours" else steps_of_trl)(output, lines)
    of_steps = [step["step_s"] for step in steps[1:]]
    return {
        "peer": peer,
        "seed": seed,
        "first_step_s": steps[0]["time"],
        "step_s": statistics.median(of_steps) if of_steps else None,
        "tokens_per_s": statistics.median(tokens_per_second(step, options) for step in steps[1:] or steps),
        "run_s": seconds,
        "peak_gib": peak[0],
        "mismatch": statistics.median(step["mismatch"] for step in steps),
        "reward_first": steps[0]["reward"],
        "reward_last": statistics.mean(step["reward"] for step in steps[-5:]),
        "held_out": held_out(exported, environment, options),
        "steps": steps,
    }


def run_with_times(command: list[str], environment: dict[str, str], log: Path) -> tuple[int, list[tuple[float, str]]]:
    """Runs a command. Returns its exit code and its lines, with the seconds after which each came."""
    started, lines = time.monotonic(), []
    with log.open("w") as copy:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic() - started, line))
            copy.write(line)
            copy.flush()
    return process.wait(), lines


def tokens_per_second(step: Record, options: argparse.Namespace) -> float:
    return options.prompts * options.group * step["length"] / step["step_s"]


def ours(seed: int, output: Path, options: argparse.Namespace) -> list[str]:
    """The command of this package's run."""
    config = {
        "algorithm": "grpo",
        "output": str(output / "run"),
        "seed": seed,
        "model": {"path": str(options.model)},
        "optimizer": {"lr": options.lr, "decay": "constant"},
        "length": {"steps": options.steps},
        "data": {"train": [{"path": str(options.train)}]},
        "rewards": [{"function": "last_number"}],
        "batch": {"optimizer_steps": 1},
        "rollout": {
            "prompts": options.prompts,
            "group_size": options.group,
            "max_prompt_tokens": LONGEST_PROMPT,
            "max_new_tokens": options.tokens,
            "generator": {
                "kind": "vllm",
                "python": options.vllm_python,
                "memory_fraction": 0.4,
                "replicas": options.replicas,
            },
        },
    }
    file = output / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return [sys.executable, "-m", "automodel_rl", "grpo", str(file)]


def steps_of_ours(output: Path, lines: list[tuple[float, str]]) -> tuple[list[Record], Path]:
    """The steps of this package's run, and the folder of the exported model."""
    times = [seconds for seconds, line in lines if re.match(r"step \d+/", line)]
    records = map(json.loads, (output / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [
        {
            "step": line["step"],
            "time": seconds,
            "step_s": line["time/step_s"],
            "rollout_s": line["time/rollout_s"],
            "train_s": line["time/train_s"],
            "reward": line["rollout/reward_mean"],
            "length": line["rollout/completion_tokens_mean"],
            "mismatch": math.log(line["train/logprob_error"]),  # TRL reports the mean difference of log-probabilities
        }
        for seconds, line in zip(times, records, strict=True)
    ]
    return steps, output / "run" / "final"


def trl(seed: int, output: Path, options: argparse.Namespace) -> list[str]:
    """The command of TRL's run."""
    settings = {
        "model": str(options.model),
        "train": str(options.train),
        "output": str(output / "model"),
        "seed": seed,
        "steps": options.steps,
        "prompts": options.prompts,
        "group": options.group,
        "tokens": options.tokens,
        "longest_prompt": LONGEST_PROMPT,
        "lr": options.lr,
        "of_device": options.of_device,
        "port": free_port(),
    }
    file = output / "settings.json"
    file.write_text(json.dumps(settings))
    return [options.vllm_python, str(HERE / "run_grpo_trl.py"), str(file)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def steps_of_trl(output: Path, lines: list[tuple[float, str]]) -> tuple[list[Record], Path]:
    """The steps of TRL's run, and the folder of the exported model."""
    found = [json.loads(line) | {"time": seconds} for seconds, line in lines if line.startswith('{"step"')]
    return found, output / "model"


def watch_memory(device: str, peak: list[float], ended: threading.Event) -> None:
    """Notes the most memory of a GPU in use, in GiB, until the event."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={device}"]
    while not ended.wait(1.0):
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        peak[0] = max(peak[0], float(found) / 1024 if found else 0.0)


def held_out(model: Path, environment: dict[str, str], options: argparse.Namespace) -> float | None:
    """Share of held-out prompts whose likeliest completion is right; None if there are no such prompts."""
    if options.held_out is None:
        return None
    command = [options.vllm_python, str(HERE / "score.py"), str(model), str(options.held_out), str(options.tokens)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"accuracy"')]
    return json.loads(lines[-1])["accuracy"] if lines else None


def table(runs: list[Record]) -> str:
    """Medians over seeds; accuracies with their spread."""
    lines = ["| | first step, s | step, s | tokens/s | GiB | mismatch | held out |", "|---|---|---|---|---|---|---|"]
    for peer in PEERS:
        of_peer = [run for run in runs if run["peer"] == peer and "failed" not in run]
        if not of_peer:
            continue
        keys = ("first_step_s", "step_s", "tokens_per_s", "peak_gib", "mismatch")
        medians = [statistics.median(run[key] or 0.0 for run in of_peer) for key in keys]
        reached = sorted(run["held_out"] or 0.0 for run in of_peer)
        spread = f"{statistics.mean(reached):.3f} ({reached[0]:.3f} to {reached[-1]:.3f})"
        lines.append(f"| {peer} | {' | '.join(f'{value:.4g}' for value in medians)} | {spread} |")
    return "\n".join(lines)


def draw(runs: list[Record], file: Path) -> None:
    """The mean rewards of all runs by the seconds since each was started."""
    import matplotlib

    matplotlib.use("svg" if file.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    colours = {"ours": "tab:blue", "trl": "tab:orange"}
    for run in runs:
        if "failed" in run:
            continue
        rewards = [step["reward"] for step in run["steps"]]
        label = run["peer"] if run["seed"] == runs[0]["seed"] else None
        by_step.plot([step["step"] for step in run["steps"]], rewards, colours[run["peer"]], lw=1, label=label)
        by_time.plot([step["time"] for step in run["steps"]], rewards, colours[run["peer"]], lw=1)
    by_step.set(xlabel="step", ylabel="mean reward of the step's completions")
    by_time.set(xlabel="seconds since the command")
    by_step.legend()
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    main()
