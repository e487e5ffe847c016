"""Steps of GRPO with real generation: where the time goes, and whether generator and trainer agree.

    python benchmarks/grpo.py PROMPTS.jsonl --generator transformers
    python benchmarks/grpo.py PROMPTS.jsonl --generator vllm --vllm-python PYTHON             on the same device
    python benchmarks/grpo.py PROMPTS.jsonl --generator vllm --vllm-python PYTHON --device 1  on another one
    python benchmarks/grpo.py PROMPTS.jsonl --generator joined --vllm-python PYTHON --device 1
                                                                             one that joins and reads published weights
    python benchmarks/grpo.py PROMPTS.jsonl --workload W2 --replay ...                     with router replay
    python benchmarks/grpo.py PROMPTS.jsonl --change loss.on_policy=false memory.compile=false   other settings
    python benchmarks/grpo.py PROMPTS.jsonl --change rollout.generator.sleep=2 memory.offload={}      memory in turns
    python benchmarks/grpo.py PROMPTS.jsonl --workload W32 --generator vllm --change model.lora.base=nf4 \
        weight_sync.adapters=alone rollout.generator.sleep=1 memory.offload={} memory.activation_checkpointing=full
    python benchmarks/grpo.py PROMPTS.jsonl --workload vision ...                          a picture in every prompt
    torchrun --nproc-per-node 2 benchmarks/grpo.py PROMPTS.jsonl --change parallel.dp_shard=2 ...      several ranks
    python benchmarks/grpo.py PROMPTS.jsonl --tiny                                         check the script on a CPU

W1, a dense 1.5B model, W2, a mixture of 3.2B, W32 and W70, dense models of 32B and 70B in nf4 for adapters, or a
vision-language model of Qwen2.5-VL-3B's shape (3.7B with the encoder), with random weights and a tokenizer trained on
the prompts, bf16. 16 prompts x 8 completions of at most 256 tokens; the reward is the share of digits, so that random
models differ in it.
Prints a JSON line a step, and one with the medians over the steps after the first. With --replay every step also has
the mean and the largest |generator's - trainer's log-probability| with replay and without. A generator that joins says
of every version how much it read, and how long that took. On a GPU every step has the
most memory of the device that all processes together used during rollouts, in the rest of the step, and in between.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

WORK = ("time/rollout_s", "time/logprobs_s", "time/train_s", "time/sync_s")
"""Times of the generator's and the trainer's work, and of weight syncs between them."""


def digits(completion: str, example: dict[str, Any]) -> float:
    """The reward: share of digits."""
    return sum(letter.isdigit() for letter in completion) / max(1, len(completion))


def main() -> None:
    options = parse_arguments()
    from automodel_rl.config.algorithms import GRPOConfig
    from automodel_rl.launch.process_group import join_process_group
    from automodel_rl.launch.quiet import quiet_libraries
    from automodel_rl.observe.metrics import read_lines
    from automodel_rl.trainers.train import train

    quiet_libraries()
    join_process_group(int(os.environ.get("WORLD_SIZE", "1")))
    prepared = [prepare(options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(prepared)
    assert prepared[0] is not None
    model, options.prompts, output = prepared[0]
    config = GRPOConfig.model_validate(settings(model, output, options))
    differences = watch_differences() if options.replay else []
    memory = watch_memory() if torch.cuda.is_available() else []
    with joined_generator(options, config.weight_sync.publish):
        train(config)
    if dist.get_rank():
        return
    records = read_lines(output / "metrics.jsonl")
    for measurements in (differences, memory):
        for record, measured in zip(records, measurements, strict=False):
            record |= measured
    for record in records:
        print(json.dumps({key: value for key, value in record.items() if shown(record, key)}))
    records = records[1:] or records
    result = {
        key: statistics.median(record[key] for record in records)
        for key in sorted(records[0])
        if shown(records[0], key)
    }
    share = [1 - sum(record[key] for key in WORK) / record["time/step_s"] for record in records]
    print(json.dumps({"generator": options.generator, "overhead": statistics.median(share), **result}))


def prepare(options: argparse.Namespace) -> tuple[Path, str, Path]:
    """The checkpoint, the file of prompts, and a new folder for the run."""
    sys.path.insert(0, str(Path(__file__).parent))
    from pictures import write_picture_prompts

    model = Path(options.folder) / f"automodel_rl_grpo_{options.workload}{'_tiny' if options.tiny else ''}"
    if not (model / "tokenizer.json").is_file():
        write_files(model, options)
    prompts = options.prompts
    if options.workload == "vision":
        pictures = Path(tempfile.mkdtemp(prefix="automodel_rl_pictures_"))
        prompts = write_picture_prompts(Path(prompts), pictures, 256, tiny=options.tiny)
    return model, str(prompts), Path(tempfile.mkdtemp(prefix="automodel_rl_grpo_")) / "run"


@contextlib.contextmanager
def joined_generator(options: argparse.Namespace, weights: Path | None) -> Iterator[None]:
    """A generator that joins the run, if it has such ones."""
    if options.generator != "joined" or dist.get_rank():
        yield
        return
    command = [sys.executable, "-m", "automodel_rl", "generate", "--join", str(weights)]
    if options.vllm_python:
        command += ["--vllm", options.vllm_python, "--memory-fraction", str(options.memory_fraction)]
    visible = {} if options.device is None else {"CUDA_VISIBLE_DEVICES": str(options.device)}
    with subprocess.Popen(command, env=os.environ | visible) as process:
        try:
            yield
        finally:
            process.terminate()


def shown(record: dict[str, Any], key: str) -> bool:
    wanted = (
        "difference/",
        "replay/differs",
        "rollout/routes",
        "time/",
        "train/logprob_error",
        "rollout/completion",
        "rollout/reward_mean",
        "peak/",
        "perf/",
        "memory/",
    )
    return key.startswith(wanted) and isinstance(record[key], int | float)


def watch_differences() -> list[dict[str, float]]:
    """Differences of every step: |generator's - trainer's log-probability| over the completions' tokens. The list
    fills while the run goes on."""
    from automodel_rl import Engine

    found: list[dict[str, float]] = []
    train_step = Engine.train_step

    def watching(engine: Any, microbatches: Any, *arguments: Any) -> Any:
        measured: dict[str, float] = {}
        for name, key in (("old_logprobs", "replay"), ("live_logprobs", "live")):
            pairs = [
                (microbatch.values["rollout_logprobs"] - microbatch.values[name])[microbatch.loss_mask].abs()
                for microbatch in microbatches
            ]
            difference = torch.cat(pairs)
            measured |= {
                f"difference/{key}_mean": difference.mean().item(),
                f"difference/{key}_max": difference.max().item(),
            }
        found.append(measured)
        return train_step(engine, microbatches, *arguments)

    Engine.train_step = watching  # type: ignore[method-assign, assignment]
    return found


def watch_memory() -> list[dict[str, float]]:
    """The most of the device's memory in use, by all processes, in the phases of each step: `peak/rollout_gib` while
    completions are written, `peak/exchange_gib` while memory changes hands, `peak/trainer_gib` in between. The list
    grows at the end of every step."""
    from automodel_rl.generators.supervisor import GeneratorSupervisor

    phase, num_syncs = ["trainer"], 0
    peaks: dict[str, float] = {}
    found: list[dict[str, float]] = []

    def sample() -> None:
        while True:
            free, total = torch.cuda.mem_get_info()
            key = f"peak/{phase[0]}_gib"
            peaks[key] = max(peaks.get(key, 0.0), (total - free) / 2**30)
            time.sleep(0.005)

    def within(method: Callable[..., Any], during: str, after: str) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            phase[0] = during
            try:
                return method(*arguments)
            finally:
                phase[0] = after

        return watched

    def load_weights(supervisor: Any, version: int, needed: int | None = None) -> None:
        """Comes before the first step, and at the end of each."""
        nonlocal num_syncs
        send(supervisor, version, needed)
        if num_syncs:
            found.append(dict(peaks))
        num_syncs += 1
        peaks.clear()

    send = GeneratorSupervisor.load_weights
    GeneratorSupervisor.wake = within(GeneratorSupervisor.wake, "exchange", "rollout")  # type: ignore[method-assign]
    GeneratorSupervisor.sleep = within(GeneratorSupervisor.sleep, "exchange", "trainer")  # type: ignore[method-assign]
    GeneratorSupervisor.load_weights = load_weights  # type: ignore[method-assign, assignment]
    threading.Thread(target=sample, daemon=True).start()
    return found


def write_files(folder: Path, options: argparse.Namespace) -> None:
    """The checkpoint, with a tokenizer."""
    from pictures import write_vision_checkpoint
    from workload import model_sizes, write_checkpoint

    from automodel_rl.quickstart.model import train_tokenizer

    with Path(options.prompts).open() as lines:
        texts = [*itertools.islice(lines, 1000)]
    if options.workload == "vision":
        write_vision_checkpoint(folder, texts, tiny=options.tiny)
        return
    sizes = model_sizes(options.workload, options.tiny)
    write_checkpoint(
        options.workload, folder, sizes | ({"num_hidden_layers": options.layers} if options.layers else {})
    )
    train_tokenizer(texts, 400 if options.tiny else 4000).save_pretrained(folder)


def settings(model: Path, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The run's config as nested dictionaries."""
    values = _settings(model, output, options)
    for key, value in (change.split("=", 1) for change in options.change):
        *sections, name = key.split(".")
        section = functools.reduce(lambda outer, inner: outer.setdefault(inner, {}), sections, values)
        section[name] = yaml.safe_load(value)
    return values


def _settings(model: Path, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    generator: dict[str, Any] = {"kind": options.generator}
    weight_sync: dict[str, Any] = {}
    if options.generator == "vllm":
        generator |= {"memory_fraction": options.memory_fraction, "options": {"enforce_eager": options.eager}}
        generator |= {"python": options.vllm_python} if options.vllm_python else {}
    elif options.own_process:
        generator["place"] = "shared"
    elif options.generator == "joined":
        weight_sync["publish"] = str(output.with_name("weights"))
    if options.device is not None and options.generator != "joined":
        generator["place"] = [options.device]
    longest = 24 if options.tiny else 256
    return {
        "output": str(output),
        "model": {"path": str(model), "dtype": "float32" if options.tiny else "bfloat16"},
        "data": {"train": [{"path": str(options.prompts)}]},
        "batch": {"microbatch_tokens": 8192},
        "rollout": {
            "prompts": 4 if options.tiny else 16,
            "group_size": 8,
            "max_prompt_tokens": 1536 if options.workload == "vision" else 512,
            "max_new_tokens": longest,
            "generator": generator,
            "max_staleness": options.max_staleness,
        },
        "weight_sync": weight_sync,
        "rewards": [{"function": "benchmarks.grpo:digits"}],
        "loss": {"kl": {"coefficient": 0.01}, "correction": {"kind": "truncate"}},
        "length": {"steps": options.steps},
        "optimizer": {"lr": 1e-5, "decay": "constant"},
        "router_replay": {"enabled": options.replay, "compare": options.replay},
        "checkpoint": {"every_steps": None},
        "observe": {"samples": 0},
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="JSON lines with prompt")
    parser.add_argument("--generator", choices=["transformers", "vllm", "joined"], default="transformers")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--workload", choices=["W1", "W2", "W8", "W32", "W70", "vision"], default="W1")
    parser.add_argument("--layers", type=int, help="decoder layers; the workload's by default")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where checkpoints are written")
    parser.add_argument("--replay", action="store_true", help="router replay, and a pass without it to compare")
    parser.add_argument("--own-process", action="store_true", help="the transformers generator in a process of its own")
    parser.add_argument("--device", type=int, help="the generator's own, by its number")
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--memory-fraction", type=float, default=0.3)
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs, which starts sooner")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--change", nargs="*", default=[], help="keys of the config: batch.microbatch_tokens=auto")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
