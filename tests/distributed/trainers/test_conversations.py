"""Reinforcement learning on conversations of several turns: the same episodes in every layout and with every generator,
and only sampled tokens trained."""

from pathlib import Path
from typing import Any

import pytest

from automodel_rl.errors import InputError
from tests.distributed.trainers.runs import (
    Settings,
    add_turns,
    copy_with_frequent_ends,
    metrics_of,
    rollouts_of,
    settings_of,
    train,
)
from tests.rank_pool import RankPool


@pytest.fixture(name="ending", scope="module")
def make_ending(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, but it ends its turns more often."""
    folder = tmp_path_factory.mktemp("ending") / "model"
    copy_with_frequent_ends(workspace / "model", folder)
    return folder


def values(ending: Path, workspace: Path, output: Path, rollout: dict[str, Any], **changes: Any) -> Settings:
    settings = settings_of("grpo", workspace, output, length={"steps": 2}, **changes)
    settings["model"]["path"] = str(ending)
    add_turns(settings)
    settings["rollout"] |= rollout
    return settings


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, ending: Path, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on one rank."""
    folder = tmp_path_factory.mktemp("one") / "run"
    ranks(1).run(train, values(ending, workspace, folder, {}))
    return folder


def records_of(run: Path) -> list[dict[str, Any]]:
    return [record for step in (1, 2) for record in rollouts_of(run, step)]


def test_sampled_tokens_alone_are_trained(one_rank: Path) -> None:
    for metrics in metrics_of(one_rank):
        of_step = rollouts_of(one_rank, metrics["step"])
        assert metrics["train/num_tokens"] == sum(record["sampled"] for record in of_step)
        assert metrics["train/logprob_error"] == pytest.approx(1, abs=1e-7)
        assert metrics["rollout/turns_mean"] == sum(record["turns"]["turns"] for record in of_step) / len(of_step)
        assert metrics["rollout/reward_environment"] == metrics["rollout/environment_vowels"]
    records = records_of(one_rank)
    assert {record["turns"]["turns"] for record in records} > {1}
    assert any(record["end"] == "done" for record in records)
    for record in records:
        roles = [message["role"] for message in record["messages"]]
        assert " Say " in record["messages"][0]["content"]
        assert roles[0] == "user"
        assert roles[1::2] == ["assistant"] * int(record["turns"]["turns"])
        assert record["rewards"] == {
            "environment": record["turns"]["vowels"],
            "turns": record["turns"]["turns"],
        }


@pytest.mark.parametrize(
    ("parallel", "rollout"),
    [
        ({"pp": 2}, {}),
        ({"cp": 2}, {"generator": {"kind": "transformers", "place": "shared"}}),
        ({"dp_shard": 2}, {"max_episodes": 2}),
    ],
    ids=str,
)
def test_layouts_and_generators_write_and_train_the_same(
    ranks: RankPool,
    one_rank: Path,
    ending: Path,
    workspace: Path,
    tmp_path: Path,
    parallel: dict[str, int],
    rollout: dict[str, Any],
) -> None:
    run = tmp_path / "run"
    ranks(2).run(train, values(ending, workspace, run, rollout, parallel=parallel))
    names = "train/loss", "train/grad_norm", "rollout/reward_mean", "rollout/turns_mean", "train/num_tokens"
    for metrics, expected in zip(metrics_of(run), metrics_of(one_rank), strict=True):
        for name in names:  # AdamW makes much of rounding
            assert metrics[name] == pytest.approx(expected[name], rel=1e-7), name
    assert [_plain(record) for record in records_of(run)] == [_plain(record) for record in records_of(one_rank)]


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """A record without numbers that are rounded or timed."""
    return {key: value for key, value in record.items() if key not in ("turns", "advantage", "pieces")}


def test_odd_environments_cost_their_conversations(
    ranks: RankPool, ending: Path, workspace: Path, tmp_path: Path
) -> None:
    settings = values(
        ending,
        workspace,
        tmp_path,
        {"environment": "tests.odd_environments:fuzzed", "tool_seconds": 10.0},
        parallel={"dp_shard": 2},
    )
    settings["rollout"] |= {"prompts": 20, "group_size": 5}
    ranks(2).run(train, settings)
    rows = metrics_of(tmp_path)
    assert sum(row["rollout/environment_errors"] for row in rows) > 0
    for row in rows:
        records = rollouts_of(tmp_path, row["step"])
        failed = [any(record["errors"]) for record in records]
        assert row["rollout/failed"] == sum(failed) == row["rollout/environment_errors"]
        groups = [records[start : start + 5] for start in range(0, len(records), 5)]
        written = [[record for record in group if not any(record["errors"])] for group in groups]
        kept = [group for group in written if len(group) > 1]
        assert row["train/num_tokens"] == sum(record["sampled"] for group in kept for record in group)


def refused(settings: Settings) -> str:
    with pytest.raises(InputError) as error:
        train(settings)
    return str(error.value)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"tools": ["tests.light_rewards:turns"], "environment": None}, "its schema requires type hints"),
        ({"tools": ["os.path:nothing"], "environment": None}, "cannot import it"),
        ({"environment": "os.path:nothing"}, "cannot import it"),
    ],
    ids=str,
)
def test_what_is_no_tool_is_refused_before_anything_is_written(
    ranks: RankPool, ending: Path, workspace: Path, tmp_path: Path, rollout: dict[str, Any], message: str
) -> None:
    settings = values(ending, workspace, tmp_path / "run", rollout)
    settings["rewards"] = settings["rewards"][1:]
    (text,) = ranks(1).run(refused, settings)
    assert message in text
    assert not (tmp_path / "run").exists()
