"""Reinforcement learning with a critic: what both learn, on several layouts, resumed, and what can be wrong."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, settings_of, train
from tests.rank_pool import RankPool

OF_CRITIC = ("critic/loss", "critic/value", "critic/explained_variance", "critic/grad_norm")


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    settings = settings_of("ppo", workspace, output)
    settings["critic"] = {"optimizer": {"lr": 1e-3, "decay": "constant"}}
    settings["rollout"]["group_size"] = 1
    settings["rollout"]["prompts"] = 16
    return settings | changes


def judged(output: Path, number: int = 0) -> list[dict[str, Any]]:
    return [row for row in metrics_of(output) if row["step"] > number]


KL = {"loss": {"kl": {"coefficient": 0.1, "where": "reward"}}, "length": {"steps": 2}}


@pytest.fixture(scope="module")
def one_rank_rows(ranks: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Metrics of a run on one rank."""
    folder = tmp_path_factory.mktemp("one")
    ranks(1).run(train, values(workspace, folder / "run", **KL))
    return judged(folder / "run")


@pytest.mark.parametrize("layout", ["pp", "tp", "cp"])
def test_every_layout_trains_policy_and_critic_alike(
    ranks: RankPool, workspace: Path, tmp_path: Path, one_rank_rows: list[dict[str, Any]], layout: str
) -> None:
    ranks(2).run(train, values(workspace, tmp_path / "run", parallel={layout: 2}, **KL))
    assert one_rank_rows[0]["critic/explained_variance"] < one_rank_rows[-1]["critic/explained_variance"] < 1
    for metric in (*OF_CRITIC, "train/loss", "train/grad_norm", "rollout/reward_mean"):
        expected = [row[metric] for row in one_rank_rows]
        assert [row[metric] for row in judged(tmp_path / "run")] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_resumed_run_has_its_critic_again(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    often = {"checkpoint": {"every_steps": 1, "keep_last": 2}}
    ranks(2).run(train, values(workspace, tmp_path / "whole", parallel={"dp_shard": 2}, length={"steps": 4}, **often))
    half = values(workspace, tmp_path / "half", parallel={"dp_shard": 2}, length={"steps": 4}, **often)
    ranks(2).run(train, half)
    checkpoints = tmp_path / "half" / "checkpoints"
    kept = {path.name for path in checkpoints.glob("step_*")}
    assert {path.name for path in (checkpoints / "critic").iterdir()} == kept
    assert len(kept) == 2
    again = half | {"output": str(tmp_path / "again")}
    ranks(2).run(train, again, str(checkpoints / "step_3"))
    for metric in (*OF_CRITIC, "train/loss"):
        expected = [row[metric] for row in judged(tmp_path / "whole", 3)]
        assert [row[metric] for row in judged(tmp_path / "again", 3)] == pytest.approx(expected, rel=1e-9)


def test_a_run_goes_on_from_the_newest_checkpoint_with_a_whole_critic(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 3}, checkpoint={"every_steps": 1, "keep_last": 3})
    ranks(1).run(train, settings)
    expected = {metric: judged(tmp_path / "run", 2)[0][metric] for metric in (*OF_CRITIC, "train/loss")}
    checkpoints = tmp_path / "run" / "checkpoints"
    largest = max((checkpoints / "critic" / "step_3").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: -largest.stat().st_size // 2])
    (checkpoints / "critic" / ".step_9.unfinished").mkdir()
    shutil.rmtree(tmp_path / "run" / "final")
    ranks(1).run(train, settings, "auto")
    rows = [row for row in metrics_of(tmp_path / "run") if row["step"] == 3]
    assert {metric: rows[-1][metric] for metric in expected} == pytest.approx(expected, rel=1e-9)
    assert {path.name for path in (checkpoints / "critic").iterdir()} == {"step_1", "step_2", "step_3"}


def test_a_critic_warms_up_alone_and_may_wait_on_the_host(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 3})
    settings["critic"] |= {"warmup_steps": 2, "between": "host"}
    settings["checkpoint"] = {"every_steps": 1}
    settings["gae"] = {"level": "turn", "critic_lambda": 1.0}
    ranks(1).run(train, settings)
    rows = judged(tmp_path / "run")
    stays = settings | {"output": str(tmp_path / "stays"), "critic": settings["critic"] | {"between": "device"}}
    ranks(1).run(train, stays)
    for metric in (*OF_CRITIC, "train/loss"):
        assert [row[metric] for row in judged(tmp_path / "stays")] == [row[metric] for row in rows], metric
    assert [row["train/lr"] for row in rows] == [0.0, 0.0, 1e-3]
    assert rows[0]["critic/loss"] > rows[2]["critic/loss"] > 0
    assert rows[0]["rollout/reward_mean"] != rows[1]["rollout/reward_mean"]


def test_it_learns_what_rewards_want(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 9})
    settings["rollout"]["prompts"] = 32
    settings["batch"] |= {"microbatch_tokens": 512, "epochs": 2}
    ranks(1).run(train, settings)
    rewards = [row["rollout/reward_mean"] for row in judged(tmp_path / "run")]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rewards": []}, "rewards: name at least one"),
    ({"critic": {"warmup_steps": 9}}, "critic.warmup_steps=9 with length.steps=3: the policy would never be trained"),
    ({"filter": {"dynamic": True}}, "filter.dynamic drops groups with equal rewards"),
    ({"advantage": {"kind": "rloo"}}, "advantage"),
    ({"critic": {"path": "nowhere/at/all"}}, "critic: model.path=nowhere/at/all"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert_refused("ppo", values(workspace, tmp_path / "run", **changes), message, tmp_path, capsys)
