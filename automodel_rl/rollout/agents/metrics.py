"""Metrics of a step's agents."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from automodel_rl.generators.protocol import Conversation
from automodel_rl.rollout.agents.episode import AGAIN, LEFT_OUT, REFUSED, REPLAYS, ROOTS, ROWS, SIBLINGS
from automodel_rl.rollout.episodes.episode import ASKED, CACHED, CALLS, MALFORMED, SECONDS, TURNS

MANY = 0.2
"""Forks an episode from which on a step says why histories fork."""


def agent_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Metrics of agents' episodes, under `rollout/`.

    Means over episodes: turns, calls of tools, rows and seconds; over those that are kept the agent's reward, and over
    those that report them what agents report. Added up: new
    roots, siblings, answers that were sent again, requests that were refused, sampled tokens that are left out, tokens
    that are context in a further row, and episodes that failed or that a limit ended. Shares: malformed calls of turns,
    and tokens of prompts after a first turn that the generator had cached.
    """
    if not conversations:
        return {}
    count, sums = len(conversations), defaultdict[str, float](float)
    told: defaultdict[str, list[float]] = defaultdict(list)
    for conversation in conversations:
        for name, value in conversation.metrics.items():
            sums[name] += value
            told[name].append(value)
    rewards = [conversation.reward for conversation in conversations if conversation.sampled]  # others were left out
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
    """Why histories forked, in a line; empty if few did.

    Args:
        conversations: the episodes of a step.
    """
    reasons: Counter[str] = Counter()
    for conversation in conversations:
        reasons.update(conversation.forks)
    if not conversations or reasons.total() / len(conversations) < MANY:
        return ""
    told = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
    return (
        f"histories of {len(conversations)} agents forked {reasons.total()} times, each into a row of its own: {told}"
    )
