"""Completions and rewards of reinforcement learning: groups without signal, texts cut off or empty, calls that fail."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.transformers_generator import TransformersGenerator
from automodel_rl.trainers.run import Run
from tests.distributed.trainers.runs import (
    Settings,
    generators_of,
    metrics_of,
    rollouts_of,
    settings_of,
    train,
)
from tests.rank_pool import RankPool


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("grpo", workspace, output, **changes)


def test_groups_without_signal_are_replaced(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 2}, filter={"dynamic": True}, parallel={"pp": 2})
    settings["rewards"] = [{"function": "tests.light_rewards:vowels_of_some"}]
    ranks(2).run(train, settings)
    replaced = 0
    for row in metrics_of(tmp_path / "run"):
        records = rollouts_of(tmp_path / "run", row["step"])
        groups = [{record["reward"] for record in records[start : start + 4]} for start in range(0, len(records), 4)]
        assert row["rollout/num_groups"] == len(groups)
        assert row["rollout/groups_without_signal"] == sum(len(group) == 1 for group in groups)
        learned = [record["tokens"] for i, record in enumerate(records) if len(groups[i // 4]) > 1]
        assert row["train/num_tokens"] == sum(learned[:16])
        replaced += len(groups) - 4
    assert replaced > 0


def test_completions_that_were_cut_off_may_count_nothing(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 1}, filter={"mask_overlong": True})
    settings["rollout"] |= {"stop": ["e", "o"]}
    ranks(1).run(train, settings)
    (row,) = metrics_of(tmp_path / "run")
    assert 0 < row["rollout/truncated"] < 1
    rollouts = rollouts_of(tmp_path / "run", 1)
    groups = [rollouts[start : start + 4] for start in range(0, len(rollouts), 4)]
    whole = [[rollout for rollout in group if rollout["finish"] == "stop"] for group in groups]
    assert [len(group) for group in whole if len(group) < 2] == [1], "alone in its group, it teaches nothing"
    trained = [rollout for group in whole if len(group) > 1 for rollout in group]
    assert row["train/num_tokens"] == sum(rollout["tokens"] for rollout in trained) > 0


class Silent(TransformersGenerator):
    """Writes nothing for every other request."""

    def generate(
        self, *arguments: Any, on_finished: Callable[[int, Completion], None], **more: Any
    ) -> list[Completion]:
        def silent(place: int, completion: Completion) -> None:
            on_finished(place, Completion([], [], "stop") if place % 2 else completion)

        return super().generate(*arguments, on_finished=silent, **more)


def run_silent(settings: Settings) -> None:
    with generators_of(Silent):
        train(settings)


def test_empty_completions_are_rewarded_and_count_no_tokens(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    ranks(1).run(run_silent, values(workspace, tmp_path / "run", length={"steps": 2}))
    for row in metrics_of(tmp_path / "run"):
        records = rollouts_of(tmp_path / "run", row["step"])
        assert [record["tokens"] == 0 for record in records] == [False, True] * 8
        assert row["train/num_tokens"] == sum(record["tokens"] for record in records)
        assert row["train/grad_norm"] > 0


def run_without_signal(settings: Settings) -> str:
    """How training ends."""
    with mock.patch("automodel_rl.trainers.step_rollouts.MAX_STEPS", 3):
        try:
            train(settings)
        except (InputError, RolloutError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("failing", "every call of a reward failed in this step, the first: rewards.function=.*no such thing"),
        ("same", "in 3 consecutive steps no prompt had completions with different rewards"),
    ],
)
def test_rewards_that_teach_nothing_end_the_run(
    ranks: RankPool, workspace: Path, tmp_path: Path, function: str, message: str
) -> None:
    rewards = [{"function": f"tests.light_rewards:{function}"}]
    (ended,) = ranks(1).run(run_without_signal, values(workspace, tmp_path / "run", rewards=rewards))
    assert re.search(message, ended)


def run_and_listen(settings: Settings) -> list[str]:
    """The warnings of a run."""
    with mock.patch.object(Run, "say") as say:
        train(settings)
    return [call.args[0] for call in say.call_args_list if "rewards.function" in call.args[0]]


def test_a_reward_that_fails_beside_one_that_works_is_counted_and_named(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    names = ("vowels", "failing", "vowels_or_error")
    rewards = [{"function": f"tests.light_rewards:{name}"} for name in names]
    rewards[0]["passes_at"] = 0.3
    settings = values(workspace, tmp_path / "run", length={"steps": 2, "validate_every": 2}, rewards=rewards)
    (said,) = ranks(1).run(run_and_listen, settings)
    assert sum("tests.light_rewards:failing failed in 100% of its calls" in line for line in said) == 1
    assert sum("tests.light_rewards:vowels_or_error failed in" in line for line in said) >= 1
    assert all(re.search(r"KeyError: 'no such thing' \(at .*light_rewards.py:\d+\)$", line) for line in said)
    baseline, *rows = metrics_of(tmp_path / "run")
    for row in rows:
        records = rollouts_of(tmp_path / "run", row["step"])
        failed = sum("e" in record["completion"] for record in records)
        rates = [row[f"rollout/error_rate_{name}"] for name in names]
        assert rates == [0, 1, failed / len(records)]
        assert row["rollout/reward_errors"] == len(records) + failed
    assert 0 < rows[0]["rollout/error_rate_vowels_or_error"] < 1
    assert baseline["val/error_rate_failing"] == 1
    assert 0 <= baseline["val/pass@1"] <= 1
