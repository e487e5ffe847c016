"""Reward functions with TRL's signature are called as TRL calls them."""

import pytest

from automodel_rl.config import RewardConfig
from automodel_rl.errors import InputError
from automodel_rl.rollout.rewards.scorer import Score, Scorer

REWARDS = "tests.unit.rollout.odd_rewards"
CHAT = [{"role": "user", "content": "2+2?"}]


def scores(records: list[dict], completions: list[str], **values: object) -> list[Score]:
    scorer = Scorer([RewardConfig.model_validate(values)])
    try:
        return scorer.take([scorer.submit(*pair) for pair in zip(completions, records, strict=True)])
    finally:
        scorer.close()


def test_columns_are_lists_by_name_and_none_adds_nothing() -> None:
    records = [{"prompt": "2+2?", "answer": "4", "base": 0}, {"prompt": "x?", "answer": "", "base": 1}]
    found = scores(records, ["four", "no"], function=f"{REWARDS}:brevity")
    assert [one.total for one in found] == [4.0, 0.0]
    assert not any(one.errors[0] for one in found)


def test_completions_are_messages_where_prompts_are() -> None:
    assert [one.total for one in scores([{"prompt": CHAT}], ["four"], function=f"{REWARDS}:said")] == [4.0]


def test_options_are_arguments_and_unknown_ones_are_refused() -> None:
    found = scores([{"prompt": "x"}], ["four"], function=f"{REWARDS}:scaled", options={"factor": 3.0})
    assert [one.total for one in found] == [12.0]
    with pytest.raises(InputError, match=r"options \{'most': 1\} do not fit .*: use factor"):
        scores([{"prompt": "x"}], ["four"], function=f"{REWARDS}:scaled", options={"most": 1})


@pytest.mark.parametrize(
    ("function", "completion", "reward"),
    [
        ("think_format_reward", "<think>\nIt is four.\n</think>\nfour", 1.0),
        ("think_format_reward", "four", 0.0),
        ("accuracy_reward", r"\boxed{4}", 1.0),
        ("accuracy_reward", r"\boxed{5}", 0.0),
        ("reasoning_accuracy_reward", "<think>two and two</think> \\boxed{4}", 1.0),
    ],
)
def test_rewards_of_trl_itself_work(function: str, completion: str, reward: float) -> None:
    record = {"prompt": CHAT, "solution": r"\boxed{4}"}
    (found,) = scores([record], [completion], function=f"trl.rewards:{function}", time_limit=60.0)
    assert (found.errors[0], found.total) == ("", reward)
