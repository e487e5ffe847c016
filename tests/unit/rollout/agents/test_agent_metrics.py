"""Metrics of agents: what failed or was not reported has no part in a mean."""

from automodel_rl.generators.protocol import Conversation
from automodel_rl.rollout.agents.metrics import agent_metrics, why_forked


def episode(reward: float | None, forks: dict[str, int] | None = None, **metrics: float) -> Conversation:
    sampled = [] if reward is None else [True]
    end = "the agent failed" if reward is None else "done"
    return Conversation(
        [], sampled, reward=reward or 0.0, end=end, metrics=metrics, forks=forks or {}, is_agent_episode=True
    )


def test_means_are_over_the_episodes_that_have_a_number() -> None:
    metrics = agent_metrics([episode(5.0, agent_steps=10.0, rows=2), episode(None, rows=0), episode(1.0, rows=1)])
    assert metrics["rollout/environment_reward_mean"] == 3.0
    assert metrics["rollout/agent_steps_mean"] == 10.0
    assert metrics["rollout/rows_mean"] == 1.0
    assert metrics["rollout/agents_not_done"] == 1
    assert agent_metrics([]) == {}


def test_reasons_are_told_if_many_histories_fork() -> None:
    many = [episode(1.0, {"tools changed": 2}), episode(1.0, {"an answer was changed": 1})]
    assert why_forked(many).endswith(
        "forked 3 times, each into its own row: tools changed (2), an answer was changed (1)"
    )
    assert why_forked([*many, *[episode(1.0)] * 20]) == ""
