"""Rollouts of agents without ranks, for tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from automodel_rl.config import RewardConfig
from automodel_rl.config.rollout import RolloutConfig
from automodel_rl.data.template import ChatTemplate
from automodel_rl.generator_messages import Sampling
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rollouts import Rollouts
from tests.fleets import LocalCrew, fleet_of

LONGEST = 60.0


def agent_rollouts(
    crew: LocalCrew, template: ChatTemplate, folder: Path, agent: str, reward: str = "environment", **options: Any
) -> Rollouts:
    """Rollouts of an agent: one of `tests.odd_agents`, or an import path."""
    path = agent if ":" in agent else f"tests.odd_agents:{agent}"
    given = {"prompts": 2, "agent": path, "retries": 1, "episode_seconds": LONGEST, **options}
    rollout = RolloutConfig.model_validate(given)
    config: Any = SimpleNamespace(
        seed=0,
        rollout=rollout,
        world_size=1,
        router_replay=SimpleNamespace(enabled=False, on_missing="live"),
        longest_sequence=rollout.max_prompt_tokens + rollout.completion_tokens,
    )
    config.model_copy = lambda update: SimpleNamespace(**{**vars(config), **update})
    fleet = fleet_of(crew)
    fleet.policy_version = 1
    return Rollouts(config, fleet, [RewardConfig(function=reward)], template, folder)


def prompts(count: int, **example: Any) -> Any:
    return [
        SimpleNamespace(
            token_ids=[1],
            example={"question": f"Question {number}?", "number": number, **example},
            messages=[],
            number=number,
            media=(),
        )
        for number in range(count)
    ]


def collected(rollouts: Rollouts, count: int = 1, group_size: int = 2, **example: Any) -> list[Rollout]:
    groups = rollouts.collect(prompts(count, **example), group_size, Sampling(50))
    return [rollout for group in groups for rollout in group]
