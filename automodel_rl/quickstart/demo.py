"""The demo: make a model and data, fine-tune over two pipeline ranks, compare before and after on held-out problems."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LengthConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    ParallelConfig,
    SFTConfig,
    SourceConfig,
    dump_config,
)
from automodel_rl.errors import EXIT_OK, InputError
from automodel_rl.launch.local import run_local_ranks
from automodel_rl.quickstart.model import train_tokenizer, write_model
from automodel_rl.quickstart.problems import final_number, make_problems, write_jsonl

SEED = 0
NUM_TRAIN, NUM_HELD_OUT = 4000, 200
STEPS = 400


def run_demo(output: str) -> int:
    """Runs the demo in a new folder and returns the exit code."""
    folder = Path(output)
    if folder.exists():
        raise InputError(f"{output}: exists already; the demo makes its own folder, so name a new one")
    config_file = prepare(folder)
    _, held_out = make_problems(NUM_TRAIN, NUM_HELD_OUT, SEED)
    before = accuracy(folder / "model", held_out)
    print(f"held-out problems answered before training: {before:.0%}", flush=True)
    command = [sys.executable, "-m", "automodel_rl", "sft", str(config_file)]
    code = run_local_ranks(command, num_ranks=2)
    if code != EXIT_OK:
        return code
    final = folder / "run" / "final"
    print(f"held-out problems answered before training: {before:.0%}, after: {accuracy(final, held_out):.0%}")
    print(f"config: {config_file}")
    return EXIT_OK


def prepare(folder: Path) -> Path:
    """Writes model, data and config, and returns the config's file."""
    train, held_out = make_problems(NUM_TRAIN, NUM_HELD_OUT, SEED)
    write_jsonl(folder / "data" / "train.jsonl", train)
    write_jsonl(folder / "data" / "held_out.jsonl", held_out)
    texts = [message["content"] for record in train for message in record["messages"]]
    write_model(folder / "model", train_tokenizer(texts, vocab_size=512), SEED)
    config = SFTConfig(
        output=str(folder / "run"),
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        data=DataConfig(
            train=(SourceConfig(path=str(folder / "data" / "train.jsonl")),),
            validation=(SourceConfig(path=str(folder / "data" / "held_out.jsonl")),),
        ),
        batch=BatchConfig(sequences=64, row_tokens=512),
        length=LengthConfig(steps=STEPS, validate_every=100),
        parallel=ParallelConfig(pp=2),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=20, weight_decay=0.01),
        checkpoint=CheckpointConfig(every=200),
        observe=ObserveConfig(samples=4, sample_tokens=32),
    )
    file = folder / "sft.yaml"
    file.write_text(dump_config(config))
    return file


@torch.no_grad()
def accuracy(checkpoint: Path, problems: list[dict]) -> float:
    """Share of problems whose final number is right, by greedy decoding with plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [problem["messages"][:-1] for problem in problems]
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    generated = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answers = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    expected = [problem["messages"][-1]["content"] for problem in problems]
    right = [final_number(a) == final_number(e) for a, e in zip(answers, expected, strict=True)]
    return sum(right) / len(right)
