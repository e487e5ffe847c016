"""Runs on chats with pictures: the components on ranks of their own, and what can be wrong with the data."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, rollouts_of, settings_of, train
from tests.rank_pool import RankPool
from tests.vision import MARKS, Marks, make_vision_workspace

FAN_OUT = {"vision": {"ranks": 0}, "language": {"ranks": "1-2", "dp_shard": 2}}
SPLIT = {"vision": {"ranks": "0-1", "tp": 2}, "language": {"ranks": "2-3", "dp_shard": 2}}
FAN_IN = {"vision": {"ranks": "0-1", "dp_shard": 2}, "language": {"ranks": 2}}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_workspace(tmp_path_factory.mktemp("pictures"), "qwen2_5_vl")


def settings(pictures: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("sft", pictures, output, **changes)


def test_placements_train_alike_and_leave_a_model_that_transformers_opens(
    ranks: RankPool, pictures: Path, tmp_path: Path
) -> None:
    """With the first rank, which keeps the metrics, without the language model."""
    ranks(3).run(train, settings(pictures, tmp_path / "out", components=FAN_OUT))
    ranks(2).run(train, settings(pictures, tmp_path / "pp", parallel={"pp": 2}))
    rows = metrics_of(tmp_path / "out")
    assert [("val/loss" in row) for row in rows] == [False, True, False, True]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    for row, other in zip(rows, metrics_of(tmp_path / "pp"), strict=True):
        for key in ("train/loss", "train/grad_norm", "train/num_tokens", "data/num_sequences"):
            assert row[key] == pytest.approx(other[key], rel=1e-5)
    final = tmp_path / "out" / "final"
    assert AutoModelForImageTextToText.from_pretrained(final).config.model_type == "qwen2_5_vl"
    AutoImageProcessor.from_pretrained(final, backend="pil")


def test_a_run_goes_on_with_the_modules_on_other_ranks(ranks: RankPool, pictures: Path, tmp_path: Path) -> None:
    def run(name: str, components: dict, steps: int) -> Settings:
        changes = {"optimizer": {"lr": 1e-3, "decay": "constant"}, "checkpoint": {"every_steps": 2}}
        return settings(pictures, tmp_path / name, components=components, length={"steps": steps}, **changes)

    ranks(3).run(train, run("whole", FAN_OUT, 4))
    ranks(3).run(train, run("moved", FAN_OUT, 2))
    ranks(3).run(train, run("moved", FAN_IN, 4), "auto")
    whole, moved = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "moved")
    assert [row["step"] for row in moved] == [1, 2, 3, 4]
    for row, other in zip(whole, moved, strict=True):
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)


def test_pairs_with_pictures_train_alike_on_any_placement(ranks: RankPool, tmp_path: Path) -> None:
    pictures = make_vision_workspace(tmp_path, "qwen3_vl")
    batch = {"pairs": 6, "microbatch_tokens": 250}
    for number, name, layout in (
        (1, "one", {}),
        (3, "out", {"components": FAN_OUT}),
        (2, "pp", {"parallel": {"pp": 2}}),
    ):
        ranks(number).run(
            train, settings_of("dpo", pictures, tmp_path / name, batch=batch, length={"steps": 3}, **layout)
        )
    one = metrics_of(tmp_path / "one")
    assert one[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-10)
    assert one[-1]["train/loss"] < 0.68
    for name in ("out", "pp"):
        for row, other in zip(one, metrics_of(tmp_path / name), strict=True):
            for key in ("train/loss", "train/grad_norm", "train/margin"):
                assert other[key] == pytest.approx(row[key], rel=1e-8, abs=1e-12)


LONG: dict[str, Any] = {
    "batch": {"microbatch_tokens": 400, "optimizer_steps": 2},
    "rollout": {"prompts": 4, "group_size": 4, "max_prompt_tokens": 300, "max_new_tokens": 10},
}
"""For images of many tokens."""


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen2_5_vl", {}),
        ("mistral3", {}),
        ("gemma3", {}),
        ("llava", {}),
        ("qwen3_vl_moe", {"router_replay": {"enabled": True}}),
        ("qwen3_5", {}),
        ("gemma4", LONG),
    ],
    ids=["qwen2_5_vl", "mistral3", "gemma3", "llava", "qwen3_vl_moe and routes", "qwen3_5", "gemma4"],
)
def test_rewards_of_pictures_are_learned_from_alike_on_any_placement(
    ranks: RankPool, tmp_path: Path, family: str, changed: dict
) -> None:
    """With a first rank without the language model, which writes completions like the others."""
    workspace = make_vision_workspace(tmp_path, family)
    changes = {"batch": {"microbatch_tokens": 250, "optimizer_steps": 2}, "length": {"steps": 3}, **changed}
    changes["rewards"] = [{"function": "tests.light_rewards:vowels_and_pictures"}]
    for number, name, layout in (
        (1, "one", {}),
        (3, "out", {"components": FAN_OUT}) if family != "gemma3" else (4, "out", {"components": SPLIT}),
        (2, "pp", {"parallel": {"pp": 2}}),
    ):
        ranks(number).run(train, settings_of("grpo", workspace, tmp_path / name, **changes, **layout))
    one = metrics_of(tmp_path / "one")
    assert all(row["train/logprob_error"] == pytest.approx(1, abs=1e-5) for row in one)
    assert not any(row["rollout/reward_errors"] for row in one)
    tolerance = 1e-4 if family == "gemma4" else 1e-8  # norms and routers sum their gradients in fp32
    for name in ("out", "pp"):
        for row, other in zip(one, metrics_of(tmp_path / name), strict=True):
            for key in ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/kl_ref"):
                assert other[key] == pytest.approx(row[key], rel=tolerance, abs=1e-12)
    records = [record for step in (1, 2, 3) for record in rollouts_of(tmp_path / "out", step)]
    if family not in ("gemma3", "qwen3_5"):  # whose prompts with two images are longer than the limit
        mark = MARKS.get(family, Marks()).image
        assert any(len(record.get("images", [])) == 2 and record["prompt"].count(mark) == 2 for record in records)
    same = ("prompt", "images", "completion", "reward", "advantage")
    for record, other in zip(records, rollouts_of(tmp_path / "one", 1), strict=False):
        assert [record.get(key) for key in same] == [other.get(key) for key in same]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_are_seen_alike_by_generator_and_trainer(ranks: RankPool, tmp_path: Path, family: str) -> None:
    workspace = make_vision_workspace(tmp_path, family, num_chats=8)
    records = [json.loads(line) for line in (workspace / "train_prompts.jsonl").read_text().splitlines()]
    for record in records:
        for part in record["prompt"][0]["content"] if record["images"] else []:
            part["type"] = {"image": "video"}.get(part["type"], part["type"])
        record["videos"] = [[picture] * 3 for picture in record.pop("images")]
    (workspace / "train_prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = settings_of(
        "grpo", workspace, tmp_path / "run", length={"steps": 2}, batch={"microbatch_tokens": 400}
    )  # fmt: skip
    settings["rollout"] |= {"max_prompt_tokens": 250}
    ranks(1).run(train, settings)
    assert all(row["train/logprob_error"] == pytest.approx(1, abs=1e-5) for row in metrics_of(tmp_path / "run"))
    assert any(record.get("videos") for record in rollouts_of(tmp_path / "run", 1))


def test_a_generator_in_a_process_of_its_own_gets_pictures(ranks: RankPool, tmp_path: Path) -> None:
    workspace = make_vision_workspace(tmp_path, "llava", num_chats=8)
    settings = settings_of(
        "grpo", workspace, tmp_path / "run", length={"steps": 2}, batch={"microbatch_tokens": 250},
        rewards=[{"function": "tests.light_rewards:vowels_and_pictures"}],
    )  # fmt: skip
    settings["rollout"] |= {"generator": {"kind": "transformers", "place": "shared"}}
    ranks(1).run(train, settings)
    assert all(row["train/logprob_error"] == pytest.approx(1, abs=1e-5) for row in metrics_of(tmp_path / "run"))


def test_adapters_learn_from_rewards_of_pictures_and_go_on_elsewhere(ranks: RankPool, tmp_path: Path) -> None:
    workspace = make_vision_workspace(tmp_path, "qwen2_5_vl")
    lora = {"rank": 4, "targets": ["q_proj", "projector"]}

    def run(name: str, steps: int, **layout: Any) -> Settings:
        settings = settings_of(
            "grpo", workspace, tmp_path / name, length={"steps": steps}, batch={"microbatch_tokens": 250},
            rewards=[{"function": "tests.light_rewards:vowels_and_pictures"}], checkpoint={"every_steps": 2}, **layout
        )  # fmt: skip
        return {**settings, "model": {**settings["model"], "lora": lora}}

    ranks(3).run(train, run("moved", 2, components=FAN_OUT))
    ranks(2).run(train, run("moved", 4, parallel={"pp": 2}), "auto")
    ranks(1).run(train, run("one", 4))
    for row, other in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "moved"), strict=True):
        assert row["train/logprob_error"] == pytest.approx(1, abs=1e-5)
        for key in ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/kl_ref"):
            assert other[key] == pytest.approx(row[key], rel=1e-7, abs=1e-11)
    names = load_file(tmp_path / "moved" / "final" / "adapter_model.safetensors").keys()
    assert any("visual.merger" in name for name in names)
    assert not any("visual.blocks" in name for name in names)


def _without_a_picture(record: dict) -> None:
    record["images"] = ["nowhere.png"]


def _too_few_pictures(record: dict) -> None:
    record["images"] = []


def _too_many_pictures(record: dict) -> None:
    record["images"] *= 2


def _mark_in_a_text(record: dict) -> None:
    record["messages"][-1]["content"] += " <image>"


BAD_RECORDS = {
    _without_a_picture: "train.jsonl:1: no file",
    _too_few_pictures: "train.jsonl:1: a part of type image has no file",
    _too_many_pictures: "train.jsonl:1: more images than parts of type image",
    _mark_in_a_text: "train.jsonl:1: the chat template writes 2 image tokens for 1 parts",
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("damage", "message"), BAD_RECORDS.items(), ids=[case.__name__ for case in BAD_RECORDS])
def test_bad_pictures_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, damage: Callable[[dict], None], message: str
) -> None:
    make_vision_workspace(tmp_path, "llava")
    capsys.readouterr()  # what transformers says when it saves
    record = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    damage(record)
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    assert_refused("sft", settings(tmp_path, tmp_path / "run"), message, tmp_path, capsys)


@pytest.mark.usefixtures("one_rank")
def test_pictures_are_refused_where_nothing_sees_them(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    make_vision_workspace(tmp_path, "llava")
    capsys.readouterr()  # what transformers says when it saves
    model = {"path": str(workspace / "model"), "dtype": "float32"}
    text_model = settings(tmp_path, tmp_path / "run", model=model)
    assert_refused("sft", text_model, "has a part of type image, but the model reads text only", tmp_path, capsys)
    components = {"vision": {"ranks": 0}, "language": {"ranks": 0}}
    without_encoder = settings_of("sft", workspace, tmp_path / "run", components=components)
    assert_refused("sft", without_encoder, "components: a 'qwen3' model has one component", tmp_path, capsys)
