"""Drafts of a trained layer for multi-token prediction in vLLM: how many are taken, and what they save.

    python benchmarks/drafts.py --data GSM8K --python VLLM_PYTHON --output OUT
    python benchmarks/drafts.py ... --tiny --steps 20        check the script on a CPU

A mixture of GLM-4.5's kind (0.3B) is trained from nothing on solutions of gsm8k (sft_train.jsonl), once with
`model.mtp`. vLLM then writes with no drafts, and with one and three tokens drafted at a time, by the layer as it was
before the training and after it. Prints a JSON line for each number of completions at once.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import automodel_rl
from automodel_rl.config.load import ALGORITHMS
from automodel_rl.quickstart.model import train_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 32}  # fmt: skip
NUM_PROMPTS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sft_train.jsonl and prompts_eval.jsonl")
    parser.add_argument("--python", required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "automodel_rl_drafts")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    before, run = options.output / "model", options.output / "run"
    if not (run / "final" / "config.json").is_file():
        write_model(before, options.data, options.tiny)
        train(before, run, options)
    untrained = options.output / "untrained"
    with_layer_of(run / "final", before, untrained)
    for name, checkpoint, drafts in (
        ("no drafts", run / "final", 0),
        ("the layer before training", untrained, 1),
        ("the layer after training", run / "final", 1),
        ("the layer after training", run / "final", 3),
    ):
        measure(name, checkpoint, drafts, options)


def write_model(folder: Path, data: Path, tiny: bool) -> None:
    """A checkpoint with random weights (seed 0), a tokenizer of the data, and a layer for multi-token prediction."""
    from tests.mtp_reference import add_mtp  # it needs the repository

    texts = [m["content"] for line in (data / "sft_train.jsonl").open() for m in json.loads(line)["messages"]]
    tokenizer = train_tokenizer(texts, 512 if tiny else 4096)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = SIZES | (TINY if tiny else {})
    torch.manual_seed(0)
    config = AutoConfig.for_model("glm4_moe", **sizes, vocab_size=len(tokenizer), **ids)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_mtp(folder, "glm4_moe", std=0.02)


def train(model: Path, output: Path, options: argparse.Namespace) -> None:
    """sft on the data, and on the token after the next."""
    capacity = 2048 if options.tiny else 16384
    settings = {
        "algorithm": "sft",
        "model": {"path": str(model), "mtp": {"weight": 0.3}, "dtype": "float32" if options.tiny else "bfloat16"},
        "data": {"train": [{"path": str(options.data / "sft_train.jsonl")}]},
        "batch": {"sequences": 16 if options.tiny else 128, "microbatch_tokens": capacity},
        "length": {"steps": options.steps},
        "optimizer": {"lr": 1e-3, "warmup_steps": 50},
        "output": str(output),
    }
    automodel_rl.train(ALGORITHMS["sft"].model_validate(settings))
    lines = (output / "metrics.jsonl").read_text().splitlines()
    first, last = (json.loads(line) for line in (lines[0], lines[-1]))
    losses = {key: [round(of[key], 3) for of in (first, last)] for key in ("train/loss", "train/mtp_loss")}
    print(json.dumps({"steps": options.steps, **losses}), flush=True)


def with_layer_of(checkpoint: Path, source: Path, output: Path) -> None:
    """Writes a checkpoint with another one's layer for multi-token prediction."""
    from safetensors.torch import load_file, save_file

    number = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    own, other = (load_file(folder / "model.safetensors") for folder in (checkpoint, source))
    layer = {n: t.to(own[n].dtype) for n, t in other.items() if n.startswith(f"model.layers.{number}.")}
    output.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        (output / file.name).write_bytes(file.read_bytes())
    save_file({**own, **layer}, output / "model.safetensors", metadata={"format": "pt"})


def measure(name: str, checkpoint: Path, drafts: int, options: argparse.Namespace) -> None:
    """What vLLM does with so many drafts, as JSON lines."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lines = (options.data / "prompts_eval.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    prompts = [
        tokenizer.apply_chat_template(json.loads(line)["prompt"], add_generation_prompt=True, return_dict=False)
        for line in lines
    ]
    asked = {
        "checkpoint": str(checkpoint),
        "drafts": drafts,
        "prompts": prompts,
        "at_once": [8] if options.tiny else [8, 64, 512],
        "new_tokens": 16 if options.tiny else 128,
        "tiny": options.tiny,
    }
    program = Path(__file__).with_name("drafts_in_vllm.py")
    done = subprocess.run(
        [options.python, str(program)], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        print(json.dumps({"layer": name, "drafts": drafts, "error": done.stderr[-600:]}), flush=True)
    for line in found:
        print(json.dumps({"layer": name, "drafts": drafts, **json.loads(line)}), flush=True)


if __name__ == "__main__":
    main()
