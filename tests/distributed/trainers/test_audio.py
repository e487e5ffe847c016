"""Runs on chats with audio: the components on ranks of their own, and what can be wrong with the data."""

import json
import math
from pathlib import Path

import pytest
from transformers import AutoFeatureExtractor, AutoModelForMultimodalLM

from tests.audio import make_hearing_workspace
from tests.distributed.trainers.runs import assert_refused, metrics_of, rollouts_of, settings_of, train
from tests.rank_pool import RankPool

FAN_OUT = {"audio": {"ranks": 0}, "language": {"ranks": "1-2", "dp_shard": 2}}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing_workspace(tmp_path_factory.mktemp("clips"))


@pytest.mark.parametrize(
    ("algorithm", "changes", "keys"),
    [
        ("sft", {"batch": {"sequences": 8, "microbatch_tokens": 250}}, ("train/loss", "train/grad_norm")),
        (
            "dpo",
            {"batch": {"pairs": 6, "microbatch_tokens": 250}, "length": {"steps": 3}},
            ("train/loss", "train/grad_norm", "train/margin"),
        ),
        (
            "grpo",
            {
                "batch": {"microbatch_tokens": 250, "optimizer_steps": 2},
                "length": {"steps": 3},
                "rewards": [{"function": "tests.light_rewards:vowels_and_audio"}],
            },
            ("train/loss", "train/grad_norm", "rollout/reward_mean", "train/kl_ref"),
        ),
    ],
    ids=["sft", "dpo", "grpo"],
)
def test_an_algorithm_trains_alike_on_any_placement(
    ranks: RankPool, clips: Path, tmp_path: Path, algorithm: str, changes: dict, keys: tuple[str, ...]
) -> None:
    for number, name, layout in (
        (1, "one", {}),
        (3, "out", {"components": FAN_OUT}),
        (2, "pp", {"parallel": {"pp": 2}}),
    ):
        ranks(number).run(train, settings_of(algorithm, clips, tmp_path / name, **changes, **layout))
    one = metrics_of(tmp_path / "one")
    for name in ("out", "pp"):
        for row, other in zip(one, metrics_of(tmp_path / name), strict=True):
            for key in keys:
                assert other[key] == pytest.approx(row[key], rel=1e-5 if algorithm == "sft" else 1e-8, abs=1e-12)
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
        assert all(len(record.get("audio", [])) == record["prompt"].count("<|AUDIO|>") for record in records)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio": ["nowhere.wav"]}, "train.jsonl:1: there is no file"),
        ({"audio": []}, "train.jsonl:1: a part of type audio has no file"),
        ({"images": ["red.png"]}, "train.jsonl:1: there are more images than parts of type image"),
    ],
    ids=["no file", "too few", "pictures"],
)
def test_bad_clips_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, change: dict, message: str
) -> None:
    make_hearing_workspace(tmp_path, num_chats=1)
    capsys.readouterr()  # what transformers says when it saves
    record = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    (tmp_path / "train.jsonl").write_text(json.dumps(record | change) + "\n")
    assert_refused("sft", settings_of("sft", tmp_path, tmp_path / "run"), message, tmp_path, capsys)
