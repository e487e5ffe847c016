"""What is learned from a group: whether its rewards differ, which completions count, and which tokens."""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.config import FilterConfig
from automodel_rl.generator_messages import RawCompletion
from automodel_rl.generators.completions import completion_of
from automodel_rl.generators.protocol import Completion
from automodel_rl.rollout.groups import Group, rollout_metrics, rollout_records, shaped_rewards
from automodel_rl.rollout.protocol import Rollout
from automodel_rl.rollout.rewards.scorer import Score

PROMPT: Any = SimpleNamespace(token_ids=[1, 2], example={}, messages=[], number=0, media=())
TOKENIZER: Any = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))


def rollout(reward: float, length: int = 3, logprobs: list[float] | None = None) -> Rollout:
    score = Score(reward, (reward,), ("m:judge: gone" if math.isnan(reward) else "",))
    return Rollout(Completion([5] * length, logprobs or [-1.0] * length, "stop"), "text", score)


def group_of(rollouts: list[Rollout], **filter: Any) -> Group:
    return Group(PROMPT, rollouts, shaped_rewards(rollouts, FilterConfig.model_validate(filter), 8))


def test_a_penalty_for_length_alone_is_no_signal() -> None:
    group = group_of([rollout(0.0, 3), rollout(0.0, 7), rollout(0.0, 8)], overlong_buffer=4)
    assert group.rewards.tolist() == [0.0, -0.75, -1.0]
    assert not group.has_signal
    assert group.unshaped.rewards.tolist() == [0.0, 0.0, 0.0]
    assert group_of([rollout(0.0, 3), rollout(1.0, 8)], overlong_buffer=4).has_signal  # 0 and 0 after the penalty
    assert rollout_metrics([group], ["judge"], 0)["rollout/groups_without_signal"] == 1


def cut(reward: float) -> Rollout:
    return Rollout(Completion([5] * 8, [-1.0] * 8, "length"), "text", Score(reward, (reward,), ("",)))


@pytest.mark.parametrize(
    ("rollouts", "compared", "has_signal"),
    [
        ([rollout(0.0), rollout(0.0), rollout(0.0), cut(1.0)], [0.0] * 3, False),
        ([rollout(1.0), rollout(1.0), cut(0.0), cut(0.0)], [1.0] * 2, False),
        ([rollout(1.0), rollout(0.0), cut(0.0), cut(0.5)], [1.0, 0.0], True),
        ([rollout(1.0), cut(0.0)], [1.0], False),
        ([cut(1.0), cut(0.0)], [], False),
    ],
)
def test_a_completion_that_is_masked_leaves_its_group(
    rollouts: list[Rollout], compared: list[float], has_signal: bool
) -> None:
    whole = group_of(rollouts)
    group = dataclasses.replace(whole, excludes_truncated=True)
    assert group.compared.rewards.tolist() == compared
    assert len(group.compared.rollouts) == len(compared)
    assert group.has_signal is has_signal
    assert whole.has_signal  # where masked ones count
    assert rollout_metrics([group], ["judge"], 0)["rollout/reward_mean"] == whole.rewards.mean()


@pytest.mark.parametrize(
    ("weights", "has_signal"),
    [((), False), ((1.0, 1.0, 1.0), True), ((1.0, 1.0, 0.0), True), ((0.0, 0.0, 1.0), False), ((0.0,) * 3, False)],
)
def test_rewards_that_are_compared_alone_have_signal_if_any_with_a_weight_differs(
    weights: tuple[float, ...], has_signal: bool
) -> None:
    parts = [(1.0, 0.0, 0.5), (0.0, 1.0, 0.5), (1.0, 0.0, 0.5)]
    rollouts = [Rollout(Completion([5], [-1.0], "stop"), "", Score(sum(of), of, ("",) * 3)) for of in parts]
    group = dataclasses.replace(group_of(rollouts), weights=weights)
    assert group.has_signal is has_signal


def test_a_completion_that_failed_leaves_its_group() -> None:
    failed = Rollout(Completion([], [], "error", "the agent raised"), "", Score(0.0, (0.0,), ("",)))
    group = group_of([rollout(1.0), failed, rollout(0.5)])
    assert group.scored.rewards.tolist() == [1.0, 0.5]
    assert group.scored.unshaped.rewards.tolist() == [1.0, 0.5]
    assert not group_of([rollout(1.0), failed]).is_comparable
    assert rollout_metrics([group], ["judge"], 0)["rollout/reward_mean"] == 0.75


def test_a_completion_without_a_reward_leaves_its_group() -> None:
    group = group_of([rollout(1.0), rollout(math.nan), rollout(0.0)])
    assert group.scored.rewards.tolist() == [1.0, 0.0]
    assert group.has_signal
    assert group.is_comparable
    assert not group_of([rollout(1.0), rollout(math.nan)]).is_comparable
    metrics = rollout_metrics([group], ["judge"], 0)
    assert metrics["rollout/left_out"] == 1
    assert metrics["rollout/reward_mean"] == metrics["rollout/reward_judge"] == 0.5
    records = rollout_records([group], ["judge"], TOKENIZER, {})
    assert [json.loads(json.dumps(record, allow_nan=False))["reward"] for record in records] == [1.0, None, 0.0]
    assert records[1]["rewards"] == {"judge": None}


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, 0.5])
def test_tokens_whose_log_probability_is_none_are_counted_and_not_trained(bad: float) -> None:
    completion = rollout(1.0, logprobs=[-1.0, bad, 1e-6])
    assert completion.branches(PROMPT)[0].trained == [True, False, True]
    assert rollout_metrics([group_of([completion, rollout(0.0)])], ["judge"], 0)["rollout/invalid_logprobs"] == 1


def test_a_report_with_a_token_of_no_log_probability_is_a_completion_all_the_same() -> None:
    found = completion_of(RawCompletion([5, 6], [math.nan, -1.0], "stop"))
    assert (found.finish, found.branches([1])[0].trained) == ("stop", [False, True])
    assert completion_of(RawCompletion([5], ["-1"], "stop")).finish == "error"  # type: ignore[list-item]
