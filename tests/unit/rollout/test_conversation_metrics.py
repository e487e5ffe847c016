"""Metrics of a step's conversations add up what each has counted."""

from automodel_rl.generators.protocol import Conversation
from automodel_rl.rollout.episodes.episode import ASKED, CACHED, CALLS, ENVIRONMENT_ERRORS, MALFORMED, SECONDS, TURNS
from automodel_rl.rollout.episodes.tools import FAILED
from automodel_rl.rollout.groups import conversation_metrics


def test_shares_are_of_turns_and_calls_and_means_of_conversations() -> None:
    conversations = [
        Conversation(
            [1], [True, False, False, True], reward=1.0, metrics={TURNS: 2, CALLS: 3, FAILED: 1, SECONDS: 0.5}
        ),
        Conversation([1], [True], reward=-2.0, end="tokens", metrics={TURNS: 6, CALLS: 1, MALFORMED: 2, SECONDS: 1.5}),
        Conversation([1], [], end="error", metrics={TURNS: 0, ENVIRONMENT_ERRORS: 1}),
        Conversation([1], [True], end="turns", metrics={CACHED: 6, ASKED: 24}),
    ]
    found = conversation_metrics(conversations)
    assert found["rollout/turns_mean"] == 8 / 4
    assert found["rollout/calls_mean"] == 4 / 4
    assert found["rollout/malformed_calls"] == 2 / 8
    assert found[f"rollout/{FAILED}"] == 1 / 4
    assert found["rollout/environment_seconds_mean"] == 2.0 / 4
    assert found["rollout/environment_reward_mean"] == -1.0 / 4
    assert found["rollout/environment_errors"] == 1
    assert found["rollout/observed_tokens_mean"] == 2 / 4
    assert found["rollout/ended_by_limit"] == 2 / 4
    assert found["rollout/cached_tokens"] == 6 / 24
    assert conversation_metrics([]) == {}


def test_numbers_of_environments_may_be_negative_or_0() -> None:
    """Each of an environment's metrics is there in every step, whatever its values."""
    reported = [{"score": -3.0, "wins": 0.0}, {"score": 5.0, "wins": 0.0}, {"score": -4.0, "losses": -1.0}]
    found = conversation_metrics([Conversation([1], metrics=numbers) for numbers in reported])
    named = {name: found.get(f"rollout/environment_{name}") for name in ("score", "wins", "losses")}
    assert named == {"score": -2 / 3, "wins": 0.0, "losses": -1 / 3}
