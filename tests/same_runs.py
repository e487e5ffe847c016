"""Repeats small runs with an earlier commit's package and with this one's, and compares them bit for bit: weights,
rollouts, and metrics but times and memory. For changes that are to change no number.

Runs whose names end with "killed" are killed with SIGKILL three times and go on each time. The last time is this
package's turn also where the others were the earlier one's, so that its checkpoints are read.

python -m tests.same_runs COMMIT [NAME...]
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.distributed.conftest import make_workspace
from tests.distributed.trainers.runs import (
    Settings,
    add_turns,
    copy_with_frequent_ends,
    metrics_of,
    num_lines,
    rollouts_of,
    settings_of,
    tensors_of,
    write,
)
from tests.tiny import save_tiny_model
from tests.vision import make_vision_workspace

ROOT = Path(__file__).parents[1]

LAYOUTS = {"one rank": {}, "pp 2": {"pp": 2}, "dp_shard 2": {"dp_shard": 2}, "cp 2": {"cp": 2}}

KILLED, KILLS = "killed", (2, 4, 6)
"""Word in the names of runs that are killed, and the steps after which they are."""

TIMES = ("time/", "perf/", "memory/", "rollout/environment_seconds", "rollout/turn_seconds")
"""Beginnings of the names of metrics that differ between two runs of one program."""


def cases(folder: Path) -> Iterator[tuple[str, Settings]]:
    """Names and settings of the runs. Workspaces are made in the folder."""
    text, pictures = folder / "text", folder / "pictures"
    for algorithm in ("sft", "dpo", "grpo"):
        for name, parallel in LAYOUTS.items():
            yield f"{algorithm}, {name}", _float64(settings_of(algorithm, text, Path(), parallel=parallel))
    turns = _float64(settings_of("grpo", text, Path(), length={"steps": 3}))
    add_turns(turns)
    turns["rollout"]["max_episodes"] = 1  # else answers' times decide which turns are written together
    yield "grpo, conversations", turns | {"model": turns["model"] | {"path": str(folder / "ending")}}
    replay = settings_of("grpo", text, Path(), router_replay={"enabled": True}, parallel={"dp_shard": 2, "ep": 2})
    replay["batch"] = {"microbatch_tokens": 256, "epochs": 2}
    yield "grpo, router replay", replay | {"model": {"path": str(folder / "mixture"), "dtype": "float64"}}
    adapters = _float64(settings_of("grpo", text, Path(), weight_sync={"adapters": "alone"}, parallel={"pp": 2}))
    adapters["model"]["lora"] = {"rank": 2, "targets": "all-linear"}
    yield "grpo, adapters alone", adapters
    ahead = _float64(settings_of("grpo", text, Path(), parallel={"dp_shard": 2}))
    ahead["rollout"] |= {"generator": {"kind": "transformers", "place": "shared"}, "max_staleness": 1}
    ahead["rollout"] |= {"max_new_tokens": 4}  # so few that each batch is written before the next weight sync
    ahead["loss"] |= {"correction": {"kind": "truncate"}}
    yield "grpo, ahead", ahead
    for algorithm in ("sft", "dpo", "grpo"):
        often = _float64(settings_of(algorithm, text, Path(), parallel={"dp_shard": 2}, length={"steps": 8}))
        yield f"{algorithm}, {KILLED}", often | {"checkpoint": {"every_steps": 1}}
    for algorithm in ("sft", "dpo"):
        yield f"{algorithm}, pictures", settings_of(algorithm, pictures, Path(), parallel={"dp_shard": 2})
    components = {"vision": {"ranks": 0}, "language": {"ranks": 1}}
    seen = settings_of("grpo", pictures, Path(), components=components, length={"steps": 2})
    seen["batch"]["microbatch_tokens"] = 512
    seen["rollout"] |= {"max_prompt_tokens": 256}
    yield "grpo, pictures", seen


def _float64(settings: Settings) -> Settings:
    return settings | {"model": settings["model"] | {"dtype": "float64"}}


def make_workspaces(folder: Path) -> None:
    (folder / "text").mkdir(), (folder / "pictures").mkdir()
    make_workspace(folder / "text")
    make_vision_workspace(folder / "pictures", "qwen2_5_vl")
    copy_with_frequent_ends(folder / "text" / "model", folder / "ending")
    tokenizer = AutoTokenizer.from_pretrained(folder / "text" / "model")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "num_experts": 8, "mlp_only_layers": [0]}
    save_tiny_model(folder / "mixture", "qwen3_moe", **sizes)
    tokenizer.save_pretrained(folder / "mixture")


def start(tree: Path, settings: Settings, output: Path, *options: str) -> subprocess.Popen[str]:
    """A run by the package in a tree. Its console is in a file beside the config."""
    output.mkdir(parents=True, exist_ok=True)
    file = write(settings | {"output": str(output / "run")}, output)
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "automodel_rl", settings["algorithm"], file, *options]
    with (output / "console").open("a") as console:
        return subprocess.Popen(command, cwd=tree, env=environment, text=True, stdout=console, stderr=console)


def run_killed(trees: Sequence[Path], settings: Settings, output: Path) -> int:
    """A run that is killed after some steps, each time by the package of the next tree. Returns the last exit code."""
    for number, tree in enumerate(trees):
        job = start(tree, settings, output, *(["--resume", "auto"] if number else []))
        while number < len(KILLS) and job.poll() is None:
            if num_lines(output / "run" / "metrics.jsonl") >= KILLS[number]:
                job.kill()
            time.sleep(0.01)
        if job.wait() and number == len(KILLS):
            return 1
    return 0


def differences(one: Path, other: Path) -> Iterator[str]:
    """What differs between two runs, in a few words each."""
    tensors = [tensors_of(folder / "run" / "final") for folder in (one, other)]
    if tensors[0].keys() != tensors[1].keys():
        yield "names of weights"
    elif changed := [name for name in tensors[0] if not tensors[0][name].equal(tensors[1][name])]:
        yield f"{len(changed)} of {len(tensors[0])} weights"
    rows = [metrics_of(folder / "run") for folder in (one, other)]
    if len(rows[0]) != len(rows[1]):
        yield "number of steps"
    keys = {key: None for pair in zip(*rows, strict=False) for key in _differing(*pair)}
    if keys:
        yield f"metrics {', '.join(keys)}"
    for row in rows[0]:
        if not (one / "run" / "rollouts").is_dir() or not row["step"]:
            continue
        if _rollouts(one / "run", row["step"]) != _rollouts(other / "run", row["step"]):
            yield f"rollouts of step {row['step']}"


def _rollouts(run: Path, step: int) -> list[dict[str, Any]]:
    """Records of a step's rollouts without times."""
    records = rollouts_of(run, step)
    for record in records:
        record["turns"] = {name: value for name, value in record.get("turns", {}).items() if "seconds" not in name}
    return records


def _differing(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*one, *other]):
        values = [row.get(key) for row in (one, other)]
        are_nan = all(isinstance(value, float) and math.isnan(value) for value in values)
        if not key.startswith(TIMES) and values[0] != values[1] and not are_nan:
            yield key


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    commit, names = sys.argv[1], sys.argv[2:]
    wrong, known = 0, [name for name, _ in cases(ROOT)]
    if unknown := {*names} - {*known}:
        sys.exit(f"no such run: {', '.join(unknown)}: use {'; '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="same_runs_") as temporary:
        folder = Path(temporary)
        before = folder / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(before), commit], check=True, cwd=ROOT)
        try:
            make_workspaces(folder)
            for name, settings in cases(folder):
                if names and name not in names:
                    continue
                outputs = [folder / "runs" / name / when for when in ("before", "now")]
                if name.endswith(KILLED):
                    outputs.append(folder / "runs" / name / "begun before")
                    orders = ([before] * 4, [ROOT] * 4, [before] * 3 + [ROOT])
                    codes = [run_killed(order, settings, out) for order, out in zip(orders, outputs, strict=True)]
                else:
                    jobs = [start(tree, settings, out) for tree, out in zip((before, ROOT), outputs, strict=True)]
                    codes = [job.wait() for job in jobs]
                failed = [output for code, output in zip(codes, outputs, strict=True) if code]
                found = [f"fails: {(o / 'console').read_text()[-2000:]}" for o in failed] or [
                    text for other in outputs[1:] for text in differences(outputs[0], other)
                ]
                wrong += bool(found)
                print(json.dumps({"run": name, "differs": found}), flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], check=True, cwd=ROOT)
    sys.exit(f"{wrong} runs differ" if wrong else 0)


if __name__ == "__main__":
    main()
