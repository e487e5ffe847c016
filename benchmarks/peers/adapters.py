"""Adapters of an 8B on one GPU, next to Unsloth, axolotl, and TRL with peft and bitsandbytes, on full rows.

    python benchmarks/peers/adapters.py                                       everything, about 15 minutes
    python benchmarks/peers/adapters.py --bases qlora --rows 32768 --peers ours unsloth
    python benchmarks/peers/adapters.py --path unsloth=/tmp/peers trl=/tmp/peers
                                             packages that only these peers see, where they want other versions

Every run is a process of its own with the same checkpoint (Qwen3-8B's shape, random weights, seed 0) and the same rows
of 4,096 and of 32,768 tokens, 32,768 a step in one microbatch: adapters of rank 16 on all projections, over weights in
bf16 (lora) or in nf4 with quantized scales (qlora), layers recomputed, AdamW 1e-5, clip 1.0. Prints a line for each run
and then the table: the median of the steps after three to warm up. A run that fails is named with its error's last
line.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from run import HERE, run

PEERS: dict[str, tuple[str, list[str]]] = {
    "ours": ("adapters_ours", []),
    "ours_offload": ("adapters_ours", ["offload"]),
    "unsloth": ("adapters_trl", ["unsloth"]),
    "axolotl": ("adapters_axolotl", []),
    "trl": ("adapters_trl", []),
}
"""Peers by name: the script, and its last arguments."""

TOKENS_A_STEP = 32768


def main() -> None:
    options = parse_arguments()
    folder = Path(options.folder)
    if not (folder / "tokenizer.json").is_file():
        write_files(folder)
    paths = dict(pair.split("=", 1) for pair in options.path)
    found: list[dict[str, Any]] = []
    for length in options.rows:
        for base in options.bases:
            for peer in options.peers:
                script, extra = PEERS[peer]
                search = {"PYTHONPATH": f"{paths[peer]}:{HERE.parent.parent}"} if peer in paths else {}
                rows = max(1, TOKENS_A_STEP // length)
                arguments = [str(folder), str(length), str(rows), str(options.steps), base, *extra]
                found.append(run(script, arguments, options.timeout, search))
                print(json.dumps(found[-1]), flush=True)
    print(table(found))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", nargs="+", choices=["lora", "qlora"], default=["lora", "qlora"])
    parser.add_argument("--rows", nargs="+", type=int, default=[4096, 32768], help="tokens of a row")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--path", nargs="*", default=[], help="PEER=FOLDER of packages for this peer")
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "peers_W8_36"), help="the checkpoint")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of one run")
    return parser.parse_args()


def write_files(folder: Path) -> None:
    from workload import WORKLOADS, write_model

    from automodel_rl.quickstart.model import train_tokenizer

    write_model(folder, WORKLOADS["W8"] | {"num_hidden_layers": 36})
    train_tokenizer(["Peers want a tokenizer, whatever it is."], 400).save_pretrained(folder)


def table(found: list[dict[str, Any]]) -> str:
    columns = ["base", "rows", "peer", "tokens/s", "step", "GiB allocated", "reserved", "loss of step 1"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for result in found:
        if "failed" in result:
            lines.append(f"| {' '.join(result['arguments'])} | | {result['peer']} | {result['failed']} | | | | |")
            continue
        rows, length = result["rows"]
        lines.append(
            f"| {result['base']} | {rows} x {length:,} | {result['peer']} | {result['tokens_per_second']:,} | "
            f"{result['step_s']:.2f} s | {result['allocated_gib']} | {result['reserved_gib']} | {result['loss1']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
