"""Advantages and masks of groups of unequal size, as the optimizer steps get them."""

import math
from typing import Any

import pytest
import torch

from automodel_rl.batch import pack, unpack
from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.rollout.groups import Group
from automodel_rl.trainers.policy_batches import _to_sequence, rollouts_of_optimizer_step, with_advantages
from tests.unit.rollout.test_groups import group_of, rollout


def config_of(**more: Any) -> Any:
    values = {
        "algorithm": "grpo",
        "output": "run",
        "model": {"path": "model"},
        "data": {"train": [{"path": "prompts.jsonl"}]},
        "batch": {"microbatch_tokens": 4096, "optimizer_steps": 2},
        "length": {"steps": 1},
        "rollout": {"prompts": 4, "group_size": 3},
        "rewards": [{"function": "last_number"}],
    }
    return GRPOConfig.model_validate(values | more)


def advantages_of(groups: list[Group], config: Any) -> list[list[float]]:
    """The advantage of each rollout of each optimizer step, in the order of the rollouts."""
    steps = []
    for number in range(2):
        sequences = [_to_sequence(*pair, config) for pair in rollouts_of_optimizer_step(groups, number, 2)]
        steps.append(pack(sequences, 4096))
    if config.loss.kl.where == "reward":
        for microbatches in steps:
            for microbatch in microbatches:
                zeros = torch.zeros(microbatch.num_tokens)
                microbatch.values.update(old_logprobs=zeros, ref_logprobs=zeros)
    layout: Any = None
    found = []
    for microbatches in with_advantages(groups, steps, config, layout):
        (microbatch,) = microbatches
        pieces = unpack(microbatch.values["advantages"], microbatch)
        by_place = dict(zip(microbatch.order, [piece[-1].item() for piece in pieces], strict=True))
        found.append([by_place[place] for place in range(len(by_place))])
    return found


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_mean_and_deviation_are_over_the_completions_that_are_left(kind: str) -> None:
    of_groups = [[1.0, math.nan, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, math.nan]]
    groups = [group_of([rollout(reward) for reward in rewards]).scored for rewards in of_groups]
    kept = [[reward for reward in rewards if not math.isnan(reward)] for rewards in of_groups]
    centred = [[r - sum(rewards) / len(rewards) for r in rewards] for rewards in kept]
    flat = [c for of_group in centred for c in of_group]
    batch_deviation = (sum(c * c for c in flat) / (len(flat) - 1)) ** 0.5

    def expected(rewards: list[float], c: float) -> float:
        n = len(rewards)
        mean = sum(rewards) / n
        deviation = (sum((r - mean) ** 2 for r in rewards) / (n - 1)) ** 0.5
        return {
            "grpo": c / (deviation + 1e-6),
            "dr_grpo": c,
            "rloo": c * n / (n - 1),
            "reinforce": c / (batch_deviation + 1e-6),
        }[kind]

    by_group = [[expected(r, c) for c in cs] for r, cs in zip(kept, centred, strict=True)]
    found = advantages_of(groups, config_of(advantage={"kind": kind}))
    assert found == [pytest.approx([*by_group[0], *by_group[2]]), pytest.approx(by_group[1])]


def test_only_tokens_with_a_log_probability_are_in_the_loss_mask() -> None:
    group = group_of([rollout(1.0, logprobs=[-1.0, math.nan, -2.0]), rollout(0.0)])
    sequence = _to_sequence(group, group.rollouts[0], config_of())
    assert sequence.loss_mask.tolist() == [False, False, True, False, True]
