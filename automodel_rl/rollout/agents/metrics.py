"""Metrics of a step's agents."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from automodel_rl.generators.protocol import Conversation
from automodel_rl.rollout.agents.episode import AGAIN, LEFT_OUT, REFUSED, REPLAYS, ROOTS, ROWS, SIBLINGS
from automodel_rl.rollout.episodes.episode import ASKED, CACHED, CALLS, MALFORMED, SECONDS, TURNS

MANY = 0.2
"""Forks per episode from which on the causes of forks are reported."""


def agent_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Returns metrics of agents' episodes, under `rollout/`.

    Means over episodes: turns, tool calls, rows and seconds; over trained episodes, the agent's reward; over episodes
    that report them, the agents' own metrics. Sums: new roots, siblings, repeated answers, refused requests, sampled
    tokens in no row, context tokens in further rows, and episodes that failed or reached a limit. Shares: malformed
    calls per turn, and cached tokens of the prompts after a first turn.
    """
    if not conversations:
        return {}
    count, sums = len(conversations), defaultdict[str, float](float)
    told: defaultdict[str, list[float]] = defaultdict(list)
    for conversation in conversations:
        for name, value in conversation.metrics.items():
            sums[name] += value
            told[name].append(value)
    rewards = [conversation.reward for conversation in conversations if conversation.sampled]
    done = [conversation for conversation in conversations if conversation.end == "done"]
    own = (TURNS, CALLS, MALFORMED, SECONDS, ROWS, ROOTS, SIBLINGS, REPLAYS, REFUSED, LEFT_OUT, AGAIN, CACHED, ASKED)
    return {
        **({"rollout/cached_tokens": sums[CACHED] / sums[ASKED]} if sums[ASKED] else {}),
        "rollout/turns_mean": sums[TURNS] / count,
        "rollout/calls_mean": sums[CALLS] / count,
        "rollout/malformed_calls": sums[MALFORMED] / max(1.0, sums[TURNS]),
        "rollout/rows_mean": sums[ROWS] / count,
        "rollout/episode_seconds_mean": sums[SECONDS] / count,
        **({"rollout/environment_reward_mean": sum(rewards) / len(rewards)} if rewards else {}),
        "rollout/agents_not_done": count - len(done),
        **{f"rollout/{name}": sums[name] for name in (ROOTS, SIBLINGS, REPLAYS, REFUSED, LEFT_OUT, AGAIN)},
        **{f"rollout/{name}_mean": sum(told[name]) / len(told[name]) for name in sorted(told) if name not in own},
    }


def why_forked(conversations: Sequence[Conversation]) -> str:
    """Returns one line with the causes of forks; empty if there are few."""
    reasons: Counter[str] = Counter()
    for conversation in conversations:
        reasons.update(conversation.forks)
    if not conversations or reasons.total() / len(conversations) < MANY:
        return ""
    told = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
    return f"histories of {len(conversations)} agents forked {reasons.total()} times, each into its own row: {told}"
