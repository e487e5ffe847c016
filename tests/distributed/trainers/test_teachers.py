"""On-policy distillation: teachers that judge the tokens that a policy writes."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, rollouts_of, settings_of, train
from tests.rank_pool import RankPool


def values(workspace: Path, output: Path, teacher: Path, **changes: Any) -> Settings:
    settings = settings_of("grpo", workspace, output, teachers={"large": {"path": str(teacher)}}, rewards=[])
    settings["loss"] = {}
    settings["rollout"] |= {"group_size": 1, "prompts": 8} | changes.pop("rollout", {})
    return settings | changes


def tune(ranks: RankPool, workspace: Path, output: Path, steps: int) -> Path:
    settings = settings_of("sft", workspace, output, length={"steps": steps})
    settings["optimizer"] = {"lr": 3e-3, "warmup_steps": 4}
    ranks(1).run(train, settings)
    return output / "final"


@pytest.fixture(name="taught", scope="module")
def make_taught(ranks: RankPool, workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model after some fine-tuning."""
    return tune(ranks, workspace, tmp_path_factory.mktemp("taught") / "run", steps=40)


def test_a_policy_comes_close_to_its_teacher_without_rewards(
    ranks: RankPool, workspace: Path, tmp_path: Path, taught: Path
) -> None:
    settings = values(workspace, tmp_path / "run", taught, length={"steps": 8})
    settings["model"]["path"] = str(tune(ranks, workspace, tmp_path / "weak", steps=12))
    settings["optimizer"] = {"lr": 1e-3, "decay": "constant"}
    settings["batch"] = {"microbatch_tokens": 256}
    settings["rollout"] |= {"prompts": 32, "group_size": 4}
    ranks(2).run(train, settings | {"parallel": {"dp_shard": 2}})
    rows = [row for row in metrics_of(tmp_path / "run") if row["step"]]
    divergences = [row["train/teacher_kl"] for row in rows]
    assert sum(divergences[-3:]) < 0.85 * sum(divergences[:3])


def test_a_model_that_is_its_own_teacher_learns_nothing(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", workspace / "model", length={"steps": 1})
    settings["teachers"]["large"]["between"] = "host"
    ranks(1).run(train, settings)
    row = metrics_of(tmp_path / "run")[-1]
    assert row["train/teacher_kl"] == pytest.approx(0, abs=1e-10)
    assert row["train/grad_norm"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_what_a_teacher_adds_is_added_to_rewards(
    ranks: RankPool, workspace: Path, tmp_path: Path, taught: Path, sizes: dict[str, int]
) -> None:
    settings = values(workspace, tmp_path / "run", taught, length={"steps": 1}, distillation={"coefficient": 0.5})
    settings["rewards"] = [{"function": "tests.light_rewards:vowels"}]
    settings["rollout"] |= {"group_size": 4, "prompts": 4}
    settings["batch"] = {"microbatch_tokens": 128}
    world_size = 2 if sizes else 1
    ranks(world_size).run(train, settings | {"parallel": sizes})
    row, records = metrics_of(tmp_path / "run")[-1], rollouts_of(tmp_path / "run", 1)
    advantages = [record["advantage"] for record in records]
    groups = [advantages[start : start + 4] for start in range(0, 16, 4)]
    # Advantages by rewards add up to 0 in each group, and what is left is the teacher's.
    assert any(abs(sum(group)) > 1e-3 for group in groups)
    assert row["train/teacher_kl"] > 0.1


BAD: list[tuple[dict[str, Any], str]] = [
    ({"teachers": {}}, "rewards: name at least one"),
    (
        {
            "teachers": {},
            "rewards": ["tests.light_rewards:vowels"],
            "rollout": {"group_size": 2},
            "distillation": {"discount": 0.5},
        },
        "distillation: there are no teachers",
    ),
    ({"rewards": ["tests.light_rewards:vowels"]}, "rollout.group_size=1: rewards are compared within their group"),
    ({"filter": {"dynamic": True}}, "filter.dynamic leaves out groups with equal rewards"),
    ({"loss": {"on_policy": True}}, "loss.on_policy=true"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    settings = values(workspace, tmp_path / "run", workspace / "model", **changes)
    assert_refused("grpo", settings, message, tmp_path, capsys)
