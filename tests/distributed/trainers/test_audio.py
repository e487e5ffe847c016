"""Runs on chats with audio: the components on ranks of their own, and what can be wrong with the data."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoFeatureExtractor, AutoModelForMultimodalLM

from tests.audio import make_hearing_workspace
from tests.distributed.trainers.runs import assert_refused, metrics_of, rollouts_of, settings_of, train
from tests.rank_pool import RankPool

HEARS, ALSO_SEES = "qwen2_audio", "qwen2_5_omni_thinker"
FAN_OUT: dict[str, dict[str, Any]] = {
    HEARS: {"audio": {"ranks": 0}, "language": {"ranks": "1-2", "dp_shard": 2}},
    ALSO_SEES: {"vision": {"ranks": 0}, "audio": {"ranks": 1}, "language": {"ranks": "2-3", "dp_shard": 2}},
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_hearing_workspace(tmp_path_factory.mktemp(family), family) for family in FAN_OUT}


REWARDED = {
    "batch": {"microbatch_tokens": 250, "optimizer_steps": 2},
    "length": {"steps": 3},
    "rewards": [{"function": "tests.light_rewards:vowels_and_audio"}],
}


@pytest.mark.parametrize(
    ("family", "algorithm", "changes", "keys"),
    [
        (HEARS, "sft", {"batch": {"sequences": 8, "microbatch_tokens": 250}}, ("train/loss", "train/grad_norm")),
        (
            HEARS,
            "dpo",
            {"batch": {"pairs": 6, "microbatch_tokens": 250}, "length": {"steps": 3}},
            ("train/loss", "train/grad_norm", "train/margin"),
        ),
        (HEARS, "grpo", REWARDED, ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/kl_ref")),
        (ALSO_SEES, "grpo", REWARDED, ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/kl_ref")),
    ],
    ids=["sft", "dpo", "grpo", "grpo with two encoders"],
)
def test_an_algorithm_trains_alike_on_any_placement(
    ranks: RankPool,
    clips: dict[str, Path],
    tmp_path: Path,
    family: str,
    algorithm: str,
    changes: dict,
    keys: tuple[str, ...],
) -> None:
    for number, name, layout in (
        (1, "one", {}),
        (len(FAN_OUT[family]) + 1, "out", {"components": FAN_OUT[family]}),
        (2, "pp", {"parallel": {"pp": 2}}),
    ):
        ranks(number).run(train, settings_of(algorithm, clips[family], tmp_path / name, **changes, **layout))
    one = metrics_of(tmp_path / "one")
    for name in ("out", "pp"):
        for row, other in zip(one, metrics_of(tmp_path / name), strict=True):
            for key in keys:
                # Encoders of Qwen's images turn queries and keys in fp32.
                exact = algorithm != "sft" and family == HEARS
                assert other[key] == pytest.approx(row[key], rel=1e-8 if exact else 1e-5, abs=1e-12 if exact else 1e-8)
    if algorithm == "sft":
        assert one[-1]["train/loss"] < one[0]["train/loss"]
        assert AutoModelForMultimodalLM.from_pretrained(tmp_path / "out" / "final").config.model_type == "qwen2_audio"
        AutoFeatureExtractor.from_pretrained(tmp_path / "out" / "final")
    if algorithm == "dpo":
        assert one[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-10)
    if algorithm == "grpo":
        assert all(row["train/logprob_error"] == pytest.approx(1, abs=1e-5) for row in one)
        assert not any(row["rollout/reward_errors"] for row in one)
        records = [record for step in (1, 2, 3) for record in rollouts_of(tmp_path / "one", step)]
        assert any(record.get("audio") for record in records)
        for column, mark in (("audio", "<|AUDIO|>"), ("images", "<|IMAGE|>"), ("videos", "<|VIDEO|>")):
            assert all(len(record.get(column, [])) == record["prompt"].count(mark) for record in records)


def test_chats_are_split_with_the_clips_of_their_turns(ranks: RankPool, clips: dict[str, Path], tmp_path: Path) -> None:
    record = next(
        record
        for record in map(json.loads, (clips[HEARS] / "train.jsonl").read_text().splitlines())
        if len(record.get("audio", [])) == 2
    )
    first, second, third, fourth = record["messages"][0]["content"]
    answer = record["messages"][1]
    chat = [{"role": "user", "content": [first, second]}, answer, {"role": "user", "content": [third, fourth]}, answer]
    files = [str(clips[HEARS] / file) for file in record["audio"]]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat, "audio": files}) + "\n")
    data = {"train": [{"path": str(tmp_path / "chats.jsonl")}], "turns": "split"}
    batch = {"sequences": 2, "microbatch_tokens": 250}
    changes: dict[str, Any] = {"data": data, "batch": batch, "length": {"steps": 1}}
    ranks(1).run(train, settings_of("sft", clips[HEARS], tmp_path / "run", **changes))
    assert metrics_of(tmp_path / "run")[0]["data/num_sequences"] == 2


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio": ["nowhere.wav"]}, "train.jsonl:1: no file"),
        ({"audio": []}, "train.jsonl:1: a part of type audio has no file"),
        ({"images": ["red.png"]}, "train.jsonl:1: more images than parts of type image"),
        ({"messages": None, "text": "a text"}, "train.jsonl:1: more audio than parts of type audio"),
    ],
    ids=["no file", "too few", "pictures", "a text"],
)
def test_bad_clips_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, change: dict, message: str
) -> None:
    make_hearing_workspace(tmp_path, num_chats=1)
    capsys.readouterr()  # what transformers says when it saves
    record = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    (tmp_path / "train.jsonl").write_text(json.dumps(record | change) + "\n")
    assert_refused("sft", settings_of("sft", tmp_path, tmp_path / "run"), message, tmp_path, capsys)
