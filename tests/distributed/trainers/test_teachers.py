"""On-policy distillation: teachers that judge the tokens that a policy writes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.trainers.runs import (
    Settings,
    assert_refused,
    metrics_of,
    rollouts_of,
    settings_of,
    train,
    train_noting,
)
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


LOSS = {"divergence": "reverse_kl", "top_k": 6, "tokens_of": "student"}


def divergence_by_transformers(student: Path, teacher: Path, file: Path) -> list[float]:
    """The mean divergence of the counted tokens and the norm of its gradient, one row at a time."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in (student, teacher)]
    rows = torch.load(file, weights_only=False)
    total = torch.zeros((), dtype=torch.float64)
    for ids, mask in ((row.input_ids, row.loss_mask) for row in rows):
        p, q = (model(ids[None]).logits[0, :-1].softmax(1) for model in models)
        top = p.detach().topk(LOSS["top_k"]).indices
        p, q = (torch.cat([of.gather(1, top), 1 - of.gather(1, top).sum(1, keepdim=True)], 1) for of in (p, q))
        total = total + (p * (p / q.detach()).log()).sum(1)[mask[1:]].sum()
    loss = total / sum(int(mask[1:].sum()) for row in rows for mask in [row.loss_mask])
    loss.backward()
    return [loss.item(), torch.nn.utils.clip_grad_norm_(models[0].parameters(), math.inf).item()]


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2}], ids=str)
def test_a_divergence_from_the_teacher_over_own_completions(
    ranks: RankPool, workspace: Path, tmp_path: Path, taught: Path, sizes: dict[str, int]
) -> None:
    settings = values(workspace, tmp_path / "run", taught, length={"steps": 1}, distillation={"loss": LOSS})
    settings["batch"] = {"microbatch_tokens": 128}
    ranks(2 if sizes else 1).run(train_noting, settings | {"parallel": sizes}, tmp_path / "rows")
    row = metrics_of(tmp_path / "run")[-1]
    ((loss, norm),) = ranks(1).run(
        divergence_by_transformers, Path(settings["model"]["path"]), taught, tmp_path / "rows"
    )
    assert row["train/divergence"] == pytest.approx(loss, rel=1e-9)
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-7)


def test_a_divergence_is_added_to_what_rewards_teach(
    ranks: RankPool, workspace: Path, tmp_path: Path, taught: Path
) -> None:
    found = {}
    for name, coefficient in (("none", 1e-30), ("some", 0.5)):
        settings = values(workspace, tmp_path / name, taught, length={"steps": 1})
        settings["distillation"] = {"loss": LOSS, "coefficient": coefficient}
        settings["rewards"] = [{"function": "tests.light_rewards:vowels"}]
        settings["rollout"] |= {"group_size": 4, "prompts": 4}
        settings["batch"] = {"microbatch_tokens": 128}
        ranks(1).run(train, settings)
        found[name] = metrics_of(tmp_path / name)[-1]
    expected = found["none"]["train/loss"] + 0.5 * found["some"]["train/divergence"]
    assert found["some"]["train/loss"] == pytest.approx(expected, abs=1e-9)
    assert found["none"]["train/grad_norm"] > 1e-3


BAD: list[tuple[dict[str, Any], str]] = [
    ({"teachers": {}}, "rewards: name at least one"),
    (
        {
            "teachers": {},
            "rewards": ["tests.light_rewards:vowels"],
            "rollout": {"group_size": 2},
            "distillation": {"discount": 0.5},
        },
        "distillation: no teachers are set",
    ),
    ({"rewards": ["tests.light_rewards:vowels"]}, "rollout.group_size=1: rewards are compared within their group"),
    ({"filter": {"dynamic": True}}, "filter.dynamic drops groups with equal rewards"),
    ({"loss": {"on_policy": True}}, "loss.on_policy=true"),
    ({"distillation": {"loss": {}, "discount": 0.5}}, "discount=0.5 is for advantages"),
    ({"distillation": {"loss": {"temperature": 0.5}}}, "one pass computes both at one temperature"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    settings = values(workspace, tmp_path / "run", workspace / "model", **changes)
    assert_refused("grpo", settings, message, tmp_path, capsys)
