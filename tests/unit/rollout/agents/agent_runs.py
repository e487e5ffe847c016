"""Rollouts of agents without ranks, for tests."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.config import RewardConfig
from automodel_rl.config.rollout import RolloutConfig
from automodel_rl.data.template import ChatTemplate
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.protocol import Completion
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rollouts import Rollouts
from tests import fleets
from tests.fleets import Echo, LocalCrew, fleet_of
from tests.unit.rollout.agents.scripted import Script

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


def scripted_crew(scripts: Sequence[Script], monkeypatch: pytest.MonkeyPatch) -> LocalCrew:
    """A generator that writes each episode by a script of its own."""

    class Scripted(Echo):
        def completion(self, request: Request) -> Completion:
            assert request.conversation is not None
            return dataclasses.replace(scripts[request.conversation].write(request), versions=(3, 3))

    monkeypatch.setattr(fleets, "VOCABULARY", len(scripts[0].tokenizer))
    return LocalCrew({0: Scripted()})


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
