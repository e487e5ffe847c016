"""Preference training end to end, and what can be wrong with pairs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.config.load import ALGORITHMS
from automodel_rl.data.chat import open_chat_tokenizer
from automodel_rl.data.examples import PairDataset
from automodel_rl.hf.opened_model import OpenedModel
from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, settings_of, train
from tests.rank_pool import RankPool


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("dpo", workspace, output, **changes)


def test_it_starts_at_ln_2_and_learns_the_same_on_a_pipeline(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    ranks(1).run(train, values(workspace, tmp_path / "one"))
    ranks(2).run(train, values(workspace, tmp_path / "two", parallel={"pp": 2}))
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert one[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-10)
    assert one[0]["train/margin"] == pytest.approx(0, abs=1e-10)
    assert one[-1]["train/accuracy"] > 0.9
    assert one[-1]["val/accuracy"] > 0.9
    assert one[-1]["train/loss"] < 0.6
    for name in ("train/loss", "train/accuracy", "train/margin", "train/grad_norm"):
        assert [row[name] for row in one] == pytest.approx([row[name] for row in two], rel=1e-8, abs=1e-12)


def test_a_reference_computed_before_is_that_of_every_step(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "each", length={"steps": 4}, parallel={"dp_shard": 2})
    pairs = {"train_pairs": 0.2, "held_out_pairs": 0.8}
    settings["data"]["train"] = [{"path": str(workspace / f"{n}.jsonl"), "weight": w} for n, w in pairs.items()]
    ranks(2).run(train, settings)
    ranks(2).run(train, settings | {"output": str(tmp_path / "before"), "precompute_reference": True})
    each, before = metrics_of(tmp_path / "each"), metrics_of(tmp_path / "before")
    assert [row["train/loss"] for row in each] == pytest.approx([row["train/loss"] for row in before], rel=1e-12)


@pytest.mark.parametrize("changes", [{"loss": {"variant": "simpo"}}, {"model": {"lora": {"rank": 2}}}], ids=str)
def test_runs_that_keep_no_second_weights(ranks: RankPool, workspace: Path, tmp_path: Path, changes: dict) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 2})
    settings["model"] |= changes.pop("model", {})
    ranks(1).run(train, settings | changes)
    first, last = metrics_of(tmp_path / "run")
    assert last["train/loss"] < first["train/loss"]
    assert "val/loss" in last  # the last step validates, also without validate_every
    assert "val/loss" not in first


def test_pairs_that_are_too_long_are_cut_or_left_out(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    for overlong, count in (("truncate", "data/num_truncated"), ("drop", "data/num_dropped")):
        settings = values(
            workspace, tmp_path / overlong, length={"steps": 1}, batch={"pairs": 16, "microbatch_tokens": 164}
        )
        settings["data"] |= {"overlong": overlong, "validation": []}
        ranks(1).run(train, settings)
        (row,) = metrics_of(tmp_path / overlong)
        assert row[count] > 0


def trained_texts(settings: Settings) -> list[str]:
    """What is trained of the chosen and of the rejected completion of the first pair."""
    config = ALGORITHMS["dpo"].model_validate(settings)
    chat = open_chat_tokenizer(config, OpenedModel.open(config.model))
    sequences = PairDataset(config.data.train, chat, config.batch, None, config.data)[(0, 0)].sequences
    return [chat.tokenizer.decode(sequence.input_ids[sequence.loss_mask]) for sequence in sequences]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_every_turn_of_a_completion_is_trained_and_none_of_the_prompt(
    ranks: RankPool, workspace: Path, tmp_path: Path, role: str
) -> None:
    question, answer = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Two."}
    more = [answer | {"content": "Five."}, {"role": role, "content": "And then?"}, answer | {"content": "Six."}]
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": [question, answer, question], "chosen": more, "rejected": "Three."}) + "\n")
    settings = values(workspace, tmp_path / "run", data={"train": [{"path": str(path)}]})
    (texts,) = ranks(1).run(trained_texts, settings)
    assert texts == ["Five.<|im_end|>Six.<|im_end|>", "Three.<|im_end|>"]


def spoil(settings: Settings, folder: Path, **changes: Any) -> None:
    path = folder / "pairs.jsonl"
    record = {"prompt": "How many?", "chosen": "Two.", "rejected": "Three."} | changes
    path.write_text(json.dumps({k: v for k, v in record.items() if v is not None}) + "\n")
    settings["data"] = {"train": [{"path": str(path)}]}


BAD: list[tuple[Callable[[Settings, Path], None], str]] = [
    (lambda s, f: spoil(s, f, chosen=None), "pairs.jsonl:1: no column 'chosen', only prompt, rejected"),
    (lambda s, f: spoil(s, f, rejected=3), "pairs.jsonl:1: rejected must be a text or a list of objects"),
    (
        lambda s, f: spoil(s, f, chosen=[{"role": "user", "content": "no"}]),
        "pairs.jsonl:1: chosen must end with a turn of the assistant",
    ),
    (
        lambda s, _: s.update(loss={"variant": "ipo", "label_smoothing": 0.1}),
        "label_smoothing=0.1 is for dpo, robust and exo, not ipo",
    ),
    (lambda s, _: s["batch"].update(pairs=1) or s.update(parallel={"dp_shard": 2}), "batch.pairs=1 must be at least"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable, message: str
) -> None:
    settings = values(workspace, tmp_path / "run")
    change(settings, tmp_path)
    assert_refused("dpo", settings, message, tmp_path, capsys)
