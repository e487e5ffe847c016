"""Distillation on own completions against distillation on data, of the demo's models.

    python benchmarks/distillation.py --steps 60
    python benchmarks/distillation.py --tiny            check the script on a CPU

The teacher is the demo's model after reinforcement learning, the student the demo's model after its warm-up, which
declines most questions. Each way of distillation takes the same number of steps with as many sequences. Off-policy ways
learn from data of three kinds: right answers, the student's own first completions, and refusals. What counts is the
exact divergence KL(student || teacher) at each place of what the trained student writes, and its right answers, on
problems that nobody was trained on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from automodel_rl.observe.metrics import read_lines
from automodel_rl.quickstart.demo import TASKS, prepare
from automodel_rl.quickstart.problems import REFUSALS, make_problems, write_jsonl

TOKENS = 512
"""Above the size of the vocabulary: divergences compare all tokens."""

Config = dict[str, Any]


def run(algorithm: str, config: Config, folder: Path) -> Path:
    """Runs a config on one rank, and returns its output."""
    folder.mkdir(parents=True, exist_ok=True)
    file, output = folder / f"{algorithm}.yaml", folder / "run"
    file.write_text(yaml.safe_dump({"algorithm": algorithm, "output": str(output), **config}))
    done = subprocess.run(
        [sys.executable, "-m", "automodel_rl", algorithm, str(file)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{file}: {done.stderr[-2000:]}")
    return output


def learning(steps: int, lr: float) -> Config:
    return {
        "length": {"steps": steps},
        "optimizer": {"lr": lr, "warmup_steps": min(5, steps - 1), "decay": "constant"},
        "checkpoint": {"every_steps": None},
        "observe": {"samples": 0},
    }


def online(model: Path, teacher: Path, prompts: Path, sequences: int, group: int = 8) -> Config:
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "teachers": {"large": {"path": str(teacher)}},
        "data": {"train": [{"path": str(prompts)}]},
        "rewards": [{"function": "last_number", "weight": 0.0}],
        "rollout": {
            "prompts": sequences // group,
            "group_size": group,
            "max_prompt_tokens": 96,
            "max_new_tokens": 32,
            "validation_temperature": 1.0,
        },
        "batch": {"microbatch_tokens": 4096},
    }


def offline(model: Path, teacher: Path, chats: Path, sequences: int) -> Config:
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "teachers": {"large": {"path": str(teacher)}},
        "data": {"train": [{"path": str(chats)}]},
        "batch": {"sequences": sequences, "microbatch_tokens": 4096},
    }


def measured(model: Path, teacher: Path, data: Path, folder: Path, sequences: int) -> tuple[float, float]:
    """The divergence over what a model writes for held-out prompts, and its right answers."""
    config = online(model, teacher, data / "held_out.jsonl", sequences, 8) | learning(1, 0.0)
    config["optimizer"] = {"lr": 1e-12, "decay": "constant"}
    config["distillation"] = {"loss": {"divergence": "reverse_kl", "top_k": TOKENS}}
    row = read_lines(run("grpo", config, folder) / "metrics.jsonl")[-1]
    return row["train/divergence"], row["rollout/reward_last_number"]


def write_chats(folder: Path, problems: list[dict], rollouts: list[dict]) -> dict[str, Path]:
    """Files of chats of three kinds."""
    kinds: dict[str, list[dict]] = {"right answers": problems, "refusals": [], "the student's first completions": []}
    for number, problem in enumerate(problems):
        question = problem["messages"][0]
        answer = {"role": "assistant", "content": REFUSALS[number % len(REFUSALS)]}
        kinds["refusals"].append({"messages": [question, answer]})
    for one in rollouts:
        answer = {"role": "assistant", "content": one["completion"].removesuffix("<|im_end|>").strip()}
        if answer["content"]:
            question = {"role": "user", "content": one["prompt"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]}
            kinds["the student's first completions"].append({"messages": [question, answer]})
    paths = {}
    for name, chats in kinds.items():
        paths[name] = folder / f"{name.replace(' ', '_')}.jsonl"
        write_jsonl(paths[name], chats)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if given.tiny:
        given.steps, given.sequences = 2, 16
    folder = Path(tempfile.mkdtemp()) / "demo"
    prepare(folder, given.seed, TASKS["problems"])
    data = folder / "data"
    warm_up = yaml.safe_load((folder / "sft.yaml").read_text())
    warm_up |= {"parallel": {}, **({"length": {"steps": 5}} if given.tiny else {})}
    student = run("sft", {k: v for k, v in warm_up.items() if k not in ("algorithm", "output")}, folder / "student")
    rewarded = yaml.safe_load((folder / "grpo.yaml").read_text())
    rewarded["model"]["path"] = str(student / "final")
    rewarded |= {"parallel": {}, **({"length": {"steps": 2}} if given.tiny else {})}
    taught = run("grpo", {k: v for k, v in rewarded.items() if k not in ("algorithm", "output")}, folder / "teacher")
    first, teacher = student / "final", taught / "final"

    own = online(first, teacher, data / "prompts.jsonl", given.sequences) | learning(given.steps, given.lr)
    lists = own | {"observe": {"samples": 0}, "optimizer": {"lr": 1e-12, "decay": "constant"}}
    written = run("grpo", lists | {"length": {"steps": max(1, given.steps // 4)}}, folder / "first")
    rollouts = [row for file in sorted((written / "rollouts").glob("*.jsonl")) for row in read_lines(file)]
    problems, _ = make_problems(TASKS["problems"].num_train, 200, given.seed)
    chats = write_chats(folder, problems, rollouts)

    finals: dict[str, Path] = {"the student before": first, "the teacher": teacher}
    ways: dict[str, Config] = {
        "on-policy: a token's logarithm": {},
        "on-policy: reverse_kl": {"distillation": {"loss": {"divergence": "reverse_kl", "top_k": TOKENS}}},
        "on-policy: forward_kl": {"distillation": {"loss": {"divergence": "forward_kl", "top_k": TOKENS}}},
    }
    alone = {**own, "rewards": [], "rollout": own["rollout"] | {"prompts": given.sequences, "group_size": 1}}
    jobs = {name: ("grpo", alone | extra) for name, extra in ways.items()}
    for kind, path in chats.items():
        config = offline(first, teacher, path, given.sequences) | learning(given.steps, given.lr)
        config["loss"] = {"divergence": "forward_kl", "top_k": TOKENS}
        jobs[f"off-policy: forward_kl, {kind}"] = ("distill", config)
    count = 16 if given.tiny else 1024
    with ThreadPoolExecutor(given.at_once) as pool:
        runs = {name: pool.submit(run, *job, folder / name) for name, job in jobs.items()}
        finals |= {name: done.result() / "final" for name, done in runs.items()}
        found = {
            name: pool.submit(measured, final, teacher, data, folder / f"measured {name}", count)
            for name, final in finals.items()
        }
        for name, done in found.items():
            divergence, right = done.result()
            print(json.dumps({"way": name, "divergence": round(divergence, 4), "right": round(right, 3)}), flush=True)


if __name__ == "__main__":
    main()
