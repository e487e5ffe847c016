"""The demo: makes a model and data, fine-tunes the model on chats, then trains it on rewards, on two pipeline ranks."""

import sys
from pathlib import Path

from automodel_rl.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    GRPOConfig,
    LengthConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyBatchConfig,
    PolicyLossConfig,
    PromptDataConfig,
    RewardConfig,
    RolloutConfig,
    SFTConfig,
    SourceConfig,
    dump_config,
)
from automodel_rl.errors import EXIT_OK, InputError
from automodel_rl.launch.local import run_local_ranks
from automodel_rl.observe.metrics import read_lines
from automodel_rl.quickstart.model import train_tokenizer, write_model
from automodel_rl.quickstart.problems import as_prompt, make_problems, shy, write_jsonl

NUM_TRAIN, NUM_HELD_OUT = 4000, 200
WARM_UP_STEPS, STEPS = 450, 25


def run_demo(output: str, seed: int = 0) -> int:
    """Runs the demo in a new folder and returns the exit code."""
    folder = Path(output)
    if folder.exists():
        raise InputError(f"{output}: exists already; the demo makes its own folder, so name a new one")
    prepare(folder, seed)
    for algorithm, what in (("sft", "warm-up: supervised fine-tuning"), ("grpo", "reinforcement learning: GRPO")):
        print(f"--- {what}, {folder / algorithm}.yaml", flush=True)
        command = [sys.executable, "-m", "automodel_rl", algorithm, str(folder / f"{algorithm}.yaml")]
        code = run_local_ranks(command, num_ranks=2)
        if code != EXIT_OK:
            return code
    records = read_lines(folder / "grpo" / "metrics.jsonl")
    rewards = [record["val/reward_mean"] for record in records if "val/reward_mean" in record]
    print(f"mean reward on {NUM_HELD_OUT} held-out problems: {rewards[0]:.2f} after the warm-up, {rewards[-1]:.2f} now")
    return EXIT_OK


def prepare(folder: Path, seed: int) -> None:
    """Writes model, data and configs, with absolute paths, so that they run from anywhere.

    The chats of the warm-up show worked answers, but decline most questions. So the model learns to answer and rarely
    does; rewards then make it answer.
    """
    folder = folder.absolute()
    train, held_out = make_problems(NUM_TRAIN, NUM_HELD_OUT, seed)
    data = folder / "data"
    write_jsonl(data / "chats.jsonl", shy(train, seed))
    write_jsonl(data / "prompts.jsonl", [as_prompt(problem) for problem in train])
    write_jsonl(data / "held_out.jsonl", [as_prompt(problem) for problem in held_out])
    texts = [message["content"] for record in shy(train, seed) for message in record["messages"]]
    write_model(folder / "model", train_tokenizer(texts, vocab_size=512), seed)
    for config in (_warm_up(folder, seed), _grpo(folder, seed)):
        (folder / f"{config.algorithm}.yaml").write_text(dump_config(config))


def _warm_up(folder: Path, seed: int) -> SFTConfig:
    return SFTConfig(
        output=str(folder / "sft"),
        seed=seed,
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        data=DataConfig(train=(SourceConfig(path=str(folder / "data" / "chats.jsonl")),)),
        batch=BatchConfig(sequences=64, microbatch_tokens=512),
        length=LengthConfig(steps=WARM_UP_STEPS),
        parallel=ParallelConfig(pp=2),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=20, weight_decay=0.01),
        checkpoint=CheckpointConfig(every_steps=None),
        observe=ObserveConfig(samples=0),
    )


def _grpo(folder: Path, seed: int) -> GRPOConfig:
    return GRPOConfig(
        output=str(folder / "grpo"),
        seed=seed,
        model=ModelConfig(path=str(folder / "sft" / "final"), dtype="float32"),
        data=PromptDataConfig(
            train=(SourceConfig(path=str(folder / "data" / "prompts.jsonl")),),
            validation=(SourceConfig(path=str(folder / "data" / "held_out.jsonl")),),
        ),
        batch=PolicyBatchConfig(microbatch_tokens=512),
        rollout=RolloutConfig(
            prompts=32, group_size=8, max_prompt_tokens=96, max_new_tokens=32, validation_temperature=1.0
        ),
        rewards=(RewardConfig(function="last_number"),),
        loss=PolicyLossConfig.model_validate({"clip_high": 0.28, "kl": {"coefficient": 0.01}}),
        length=LengthConfig(steps=STEPS, validate_every=5),
        parallel=ParallelConfig(pp=2),
        optimizer=OptimizerConfig(lr=5e-4, warmup_steps=3, decay="constant"),
        checkpoint=CheckpointConfig(every_steps=None),
        observe=ObserveConfig(samples=6),
    )
