"""Combinations from dotted keys, as the examples of the table's rules give them."""

from typing import Any

from automodel_rl.config import ALGORITHMS
from automodel_rl.config.load import check_config
from automodel_rl.support.combination import Combination
from automodel_rl.support.description import ModelDescription
from tests.unit.support.examples import Keys

PLAIN = {"family": "qwen3", "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 1000, "mlp_size": 64}
"""A model whose sizes most layouts divide."""

RUN: dict[str, Any] = {"output": "never", "data.train": [{"path": "none.jsonl"}], "length.steps": 1, "model.path": "m"}
RUNS: dict[str, dict[str, Any]] = {
    "sft": {"batch": {"sequences": 16, "microbatch_tokens": 64}},
    "dpo": {"batch": {"pairs": 16, "microbatch_tokens": 64}},
    "kto": {"batch": {"sequences": 16, "microbatch_tokens": 64}},
    "reward": {"batch": {"pairs": 16, "microbatch_tokens": 64}},
    "distill": {"batch": {"sequences": 16, "microbatch_tokens": 64}, "teachers": {"large": {"path": "m"}}},
    "grpo": {
        "batch.microbatch_tokens": 64,
        "rollout": {"prompts": 8, "group_size": 4, "max_prompt_tokens": 8, "max_new_tokens": 8},
        "rewards": [{"function": "math"}],
    },
}
RUNS["ppo"] = RUNS["grpo"]
"""The least that a config of each algorithm says."""


def combination(*changes: Keys) -> Combination:
    """What a plain run with some keys changed asks for; later changes count."""
    keys = {key: value for change in changes for key, value in change.items()}
    algorithm = keys.pop("algorithm", "sft")
    of_model = {key: keys.pop(key) for key in [*keys] if key.startswith("description.")}
    description = PLAIN | {key.removeprefix("description."): value for key, value in of_model.items()}
    run = check_config(ALGORITHMS[algorithm], nested({**RUN, **RUNS[algorithm], **keys}))
    return Combination.of_run(ModelDescription(**description), run)


def nested(keys: Keys) -> dict[str, Any]:
    """Values by dotted key as the sections of a file."""
    values: dict[str, Any] = {}
    for key, value in keys.items():
        *path, last = key.split(".")
        section = values
        for name in path:
            section = section.setdefault(name, {})
        section[last] = {**value} if isinstance(value, dict) else value
    return values
