"""This package and its peers one after the other on one GPU, at 8,192 tokens and at larger microbatches.

    python benchmarks/peers/run.py                                 everything, about 40 minutes
    python benchmarks/peers/run.py --cases W1 W2 --peers ours torchtitan

Every run is a process of its own with the same checkpoint (random weights, seed 0) and the same rows: 65,536 tokens a
step, bf16 compute, fp32 master weights and gradient reduction, AdamW 1e-5, clip 1.0. Each peer's best microbatch is the
fastest line of it. Prints a line for each run and then the table. A run that fails is named with its error's last line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "W1": ("W1", {}, []),
    "W1, vocabulary 151,936": ("W1", {"vocab_size": 151936}, []),
    "W2": ("W2", {}, []),
    "W1, LoRA": ("W1", {}, ["lora"]),
}
"""Cases by name: workload, changes of its config, and options of the runs."""

PEERS = ["ours", "torchtitan", "trl"]
ROWS = 8
TOKENS = {1: 8192, 2: 16500, 4: 33200}
"""Tokens of this package's microbatches, by rows of 8,192 tokens in a microbatch of peers. Sequences do not fill rows,
so it takes a few tokens more to make as few microbatches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--rows", nargs="+", type=int, choices=TOKENS, default=list(TOKENS), help="of a microbatch")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one run")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for case in options.cases:
        workload, changes, extra = CASES[case]
        folder = checkpoint(workload, changes)
        for peer in options.peers:
            if peer == "torchtitan" and "lora" in extra:
                continue  # it has none
            for rows in options.rows:
                size = TOKENS[rows] if peer == "ours" else rows
                result = run(peer, [str(folder), str(ROWS), str(options.steps), str(size), *extra], options.timeout)
                print(json.dumps({"case": case, **result}), flush=True)
                found.setdefault(case, []).append(result)
    print(table(found))


def checkpoint(workload: str, changes: dict[str, Any]) -> Path:
    from workload import WORKLOADS, write_model

    folder = Path(tempfile.gettempdir()) / "_".join(["peers", workload, *map(str, changes.values())])
    if not (folder / "config.json").is_file():
        write_model(folder, WORKLOADS[workload] | changes)
    return folder


def run(peer: str, arguments: list[str], timeout: float, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """The line of one peer's script, with these arguments and, beside this process's, these environment variables."""
    script = HERE / f"run_{peer}.py"
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | (variables or {})
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired as late:
        sys.stderr.write((late.stderr or b"")[-4000:].decode(errors="replace"))
        return {"peer": peer, "failed": f"no result in {timeout:.0f} s", "arguments": arguments[3:]}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if lines:
        return json.loads(lines[-1])
    sys.stderr.write(done.stderr[-4000:])
    error = next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), f"exit {done.returncode}")
    return {"peer": peer, "failed": error[:160], "arguments": arguments[3:]}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    columns = ["case", "peer", "microbatch", "tokens/s", "MFU", "GiB", "loss and norm of step 1"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case, results in found.items():
        for result in results:
            if "failed" in result:
                lines.append(f"| {case} | {result['peer']} | {result['arguments']} | {result['failed']} | | | |")
                continue
            lines.append(
                f"| {case} | {result['peer']} | {result['microbatch']:,} | {result['tokens_per_second']:,} | "
                f"{result['mfu_percent']}% | {result['gib']:.0f} | {result['loss1']}, {result['gnorm1']} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
