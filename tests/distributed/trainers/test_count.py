"""A model learns from rewards to ask an environment that knows what it cannot know."""

from pathlib import Path
from typing import Any

import pytest

from tests.count_task import write_task
from tests.distributed.trainers.runs import metrics_of, train
from tests.rank_pool import RankPool

WARM_UP_STEPS, STEPS = 180, 7


@pytest.mark.longer
def test_rewards_teach_to_call_an_environments_tool(ranks: RankPool, tmp_path: Path) -> None:
    write_task(tmp_path, num_chats=4800, num_prompts=400)
    common: dict[str, Any] = {"observe": {"samples": 0}, "checkpoint": {"every_steps": None}}
    warm_up = {
        "algorithm": "sft",
        "output": str(tmp_path / "sft"),
        "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": [{"path": str(tmp_path / "chats.jsonl")}]},
        "batch": {"sequences": 32, "microbatch_tokens": 1024},
        "length": {"steps": WARM_UP_STEPS},
        "optimizer": {"lr": 3e-3, "warmup_steps": 20},
    }
    rewards = {
        "algorithm": "grpo",
        "output": str(tmp_path / "grpo"),
        "model": {"path": str(tmp_path / "sft" / "final"), "dtype": "float32"},
        "data": {
            "train": [{"path": str(tmp_path / "prompts.jsonl")}],
            "validation": [{"path": str(tmp_path / "held_out.jsonl")}],
        },
        "batch": {"microbatch_tokens": 1024},
        "rollout": {
            "environment": "tests.count_task:make",
            "prompts": 12,
            "group_size": 8,
            "max_turns": 2,
            "max_new_tokens": 44,
            "max_tokens": 112,
            "max_prompt_tokens": 64,
            "validation_temperature": 1.0,
        },
        "rewards": [{"function": "last_number"}],
        "length": {"steps": STEPS, "validate_every": STEPS},
        "optimizer": {"lr": 5e-4, "warmup_steps": 3, "decay": "constant"},
    }
    ranks(1).run(train, common | warm_up)
    ranks(1).run(train, common | rewards)
    means = [metrics["val/reward_mean"] for metrics in metrics_of(tmp_path / "grpo") if "val/reward_mean" in metrics]
    assert means[0] < 0.6
    assert means[-1] > means[0] + 0.1
    assert metrics_of(tmp_path / "grpo")[-1]["rollout/calls_mean"] > 0.6
