"""The demo: creates a model and data, fine-tunes the model on chats, then trains it on rewards, on two pipeline
ranks."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from automodel_rl.config import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
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
    SourceConfig,
    dump_config,
)
from automodel_rl.config.algorithms import GRPOConfig, SFTConfig
from automodel_rl.errors import EXIT_OK
from automodel_rl.files import new_folder
from automodel_rl.launch.local import run_local_ranks
from automodel_rl.observe.metrics import read_lines
from automodel_rl.quickstart.calculator import guessing, make_products
from automodel_rl.quickstart.model import call_text, train_tokenizer, write_model, write_vision_model
from automodel_rl.quickstart.pictures import draw_pictures, make_pictures, undecided
from automodel_rl.quickstart.problems import as_prompt, make_problems, shy, write_jsonl

NUM_HELD_OUT = 200


ADAMW = OptimizerConfig(lr=3e-3, warmup_steps=20, weight_decay=0.01)
ON_REWARDS = OptimizerConfig(lr=5e-4, warmup_steps=3, decay="constant")


@dataclass(frozen=True)
class Task:
    """A task of the demo.

    Attributes:
        make: makes training and held-out chats with correct answers, from their counts and a seed.
        make_warm_up_chats: makes the warm-up chats, from which the model learns to answer correctly only sometimes.
        digits: maximum digits per token.
        warm_up_chats: chats per step of supervised fine-tuning.
        validate_every: steps of reinforcement learning between validations.
        rollout: settings of the config's `rollout`.
    """

    make: Callable[[int, int, int], tuple[list[dict], list[dict]]]
    num_train: int
    make_warm_up_chats: Callable[[list[dict], int], list[dict]]
    digits: int
    warm_up_chats: int
    warm_up_steps: int
    steps: int
    rollout: dict[str, Any]
    has_pictures: bool = False
    warm_up_optimizer: OptimizerConfig = ADAMW
    validate_every: int = 5
    optimizer: OptimizerConfig = ON_REWARDS

    @property
    def reward(self) -> str:
        if "agent" in self.rollout:
            return "environment"
        return "exact_match" if self.has_pictures else "last_number"


PRODUCTS = Task(
    make_products,
    7500,
    guessing,
    2,
    32,
    600,
    12,
    {"prompts": 16, "max_prompt_tokens": 64, "max_new_tokens": 48, "max_tokens": 112},
)
"""Products, without a setting for who answers the model's calls."""

TASKS = {
    "problems": Task(
        functools.partial(make_problems, largest=5),
        4000,
        shy,
        1,
        64,
        120,
        12,
        {"prompts": 32, "max_prompt_tokens": 96, "max_new_tokens": 32},
        # AdamW needs twice as many steps for the same loss.
        warm_up_optimizer=ADAMW.model_copy(update={"name": "muon", "lr": 6e-3}),
        validate_every=4,
        optimizer=ON_REWARDS.model_copy(update={"decay": "cosine"}),
    ),
    "calculator": replace(
        PRODUCTS,
        rollout={
            **PRODUCTS.rollout,
            "tools": ("automodel_rl.quickstart.calculator:calculator",),
            "max_turns": 2,
        },
    ),
    "agent": replace(
        PRODUCTS,
        rollout={**PRODUCTS.rollout, "agent": "automodel_rl.quickstart.agent:solve", "max_turns": 4},
    ),
    "images": Task(
        make_pictures,
        2000,
        undecided,
        1,
        64,
        150,
        100,
        {"prompts": 32, "max_prompt_tokens": 96, "max_new_tokens": 4},
        has_pictures=True,
    ),
}
"""The demo's tasks.

- problems: word problems, most of which the model declines at first
- calculator: products, which the model guesses, or computes by calling a tool
- agent: the same, driven by an external program
- images: the larger of a picture's two colours, given a model that knows the colours' names
"""


def run_demo(output: str, seed: int = 0, task: str = "problems", vllm: str | None = None) -> int:
    """Runs the demo in a new folder and returns the exit code.

    Args:
        seed: seed of the data and of both runs.
        task: a key of `TASKS`.
        vllm: interpreter of an environment with vLLM for generation; None uses transformers.
    """
    folder = Path(output)
    prepare(folder, seed, TASKS[task], vllm)
    phases = {"sft": "warm-up: supervised fine-tuning", "grpo": "reinforcement learning: GRPO"}
    for algorithm, what in phases.items():
        print(f"--- {what}, {folder / algorithm}.yaml", flush=True)
        command = [sys.executable, "-m", "automodel_rl", algorithm, str(folder / f"{algorithm}.yaml")]
        code = run_local_ranks(command, num_ranks=2)
        if code != EXIT_OK:
            left = [*phases][[*phases].index(algorithm) :]
            commands = " && ".join(f"automodel-rl {name} {folder / name}.yaml --resume auto" for name in left)
            print(f"quickstart itself does not resume; this does: {commands}", flush=True)
            return code
    records = read_lines(folder / "grpo" / "metrics.jsonl")
    rewards = [record["val/reward_mean"] for record in records if "val/reward_mean" in record]
    print(f"mean reward on {NUM_HELD_OUT} held-out problems: {rewards[0]:.2f} after the warm-up, {rewards[-1]:.2f} now")
    return EXIT_OK


def prepare(folder: Path, seed: int, task: Task, vllm: str | None = None) -> None:
    """Writes model, data and configs into a new folder, with absolute paths, so that they run from anywhere.

    Few of the warm-up chats show correct answers, so the model learns to give them but rarely does. Rewards then
    reinforce it.

    Raises:
        InputError: the folder exists, or cannot be written.
    """
    folder = folder.absolute()
    train, held_out = task.make(task.num_train, NUM_HELD_OUT, seed)
    chats = task.make_warm_up_chats(train, seed)
    with new_folder(folder) as unfinished:
        data = unfinished / "data"
        write_jsonl(data / "chats.jsonl", chats)
        write_jsonl(data / "prompts.jsonl", [as_prompt(problem) for problem in train])
        write_jsonl(data / "held_out.jsonl", [as_prompt(problem) for problem in held_out])
        if task.has_pictures:
            draw_pictures(train + held_out, data)
        write = write_vision_model if task.has_pictures else write_model
        write(unfinished / "model", train_tokenizer(_texts(chats), vocab_size=512, digits=task.digits), seed)
        for config in (_warm_up(folder, seed, task), _grpo(folder, seed, task, vllm)):
            (unfinished / f"{config.algorithm}.yaml").write_text(dump_config(config))


def _texts(chats: list[dict]) -> list[str]:
    """Returns all texts of chats, with tool calls as the chat template renders them."""
    messages = [message for record in chats for message in record["messages"]]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    contents = [message["content"] for message in messages]
    parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
    texts = [part if isinstance(part, str) else part.get("text", "") for part in parts]
    return texts + [call_text(c["name"], c["arguments"]) for c in calls]


def _warm_up(folder: Path, seed: int, task: Task) -> SFTConfig:
    return SFTConfig(
        output=str(folder / "sft"),
        seed=seed,
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        data=DataConfig(train=(SourceConfig(path=str(folder / "data" / "chats.jsonl")),)),
        batch=BatchConfig(sequences=task.warm_up_chats, microbatch_tokens=512),
        length=LengthConfig(steps=task.warm_up_steps),
        parallel=ParallelConfig(pp=2),
        optimizer=task.warm_up_optimizer,
        checkpoint=CheckpointConfig(every_steps=None),
        observe=ObserveConfig(samples=0),
    )


def _grpo(folder: Path, seed: int, task: Task, vllm: str | None) -> GRPOConfig:
    generator = {} if vllm is None else {"generator": {"kind": "vllm", "python": vllm}}
    rollout = {"group_size": 8, "validation_temperature": 1.0, **task.rollout, **generator}
    return GRPOConfig(
        output=str(folder / "grpo"),
        seed=seed,
        model=ModelConfig(path=str(folder / "sft" / "final"), dtype="float32"),
        data=PromptDataConfig(
            train=(SourceConfig(path=str(folder / "data" / "prompts.jsonl")),),
            validation=(SourceConfig(path=str(folder / "data" / "held_out.jsonl")),),
        ),
        batch=PolicyBatchConfig(microbatch_tokens=512),
        rollout=RolloutConfig.model_validate(rollout),
        rewards=(RewardConfig(function=task.reward),),
        loss=PolicyLossConfig.model_validate({"clip_high": 0.28, "kl": {"coefficient": 0.01}}),
        length=LengthConfig(steps=task.steps, validate_every=task.validate_every),
        parallel=ParallelConfig(pp=2),
        optimizer=task.optimizer,
        checkpoint=CheckpointConfig(every_steps=None),
        observe=ObserveConfig(samples=6),
    )
