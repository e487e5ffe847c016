"""Metrics of a step's conversations."""

from collections import defaultdict
from collections.abc import Sequence

from automodel_rl.generators.protocol import Conversation
from automodel_rl.rollout.episodes.episode import (
    ASKED,
    CACHED,
    CALLS,
    ENVIRONMENT_ERRORS,
    MALFORMED,
    SECONDS,
    TURNS,
)
from automodel_rl.rollout.episodes.tools import FAILED, TIMED_OUT

OF_CALLS = (FAILED, TIMED_OUT)


def conversation_metrics(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Metrics of conversations, under `rollout/`.

    Means over conversations: turns, calls, seconds in environments, the environment's reward, tokens that were not
    sampled, and what environments report. Shares: malformed calls of turns; failed and late calls of calls;
    conversations that a limit ended; tokens of prompts after the first turn that the generator had cached. Counted:
    conversations whose environment failed.
    """
    if not conversations:
        return {}
    count = len(conversations)
    sums = defaultdict[str, float](float)
    for conversation in conversations:
        for name, value in conversation.metrics.items():
            sums[name] += value
    turns, calls = max(1.0, sums[TURNS]), max(1.0, sums[CALLS])
    limited = sum(c.end not in ("done", "error") for c in conversations)
    own = (TURNS, CALLS, MALFORMED, SECONDS, ENVIRONMENT_ERRORS, CACHED, ASKED, *OF_CALLS)
    return {
        **({"rollout/cached_tokens": sums[CACHED] / sums[ASKED]} if sums[ASKED] else {}),
        "rollout/turns_mean": sums[TURNS] / count,
        "rollout/calls_mean": sums[CALLS] / count,
        "rollout/malformed_calls": sums[MALFORMED] / turns,
        **{f"rollout/{name}": sums[name] / calls for name in OF_CALLS},
        "rollout/environment_seconds_mean": sums[SECONDS] / count,
        "rollout/environment_reward_mean": sum(c.reward for c in conversations) / count,
        "rollout/environment_errors": sums[ENVIRONMENT_ERRORS],
        "rollout/observed_tokens_mean": sum(c.sampled.count(False) for c in conversations) / count,
        "rollout/ended_by_limit": limited / count,
        **{f"rollout/environment_{name}": sums[name] / count for name in sorted(sums) if name not in own},
    }
