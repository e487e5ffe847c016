"""Reward models end to end: what they learn, what transformers and PEFT make of them, and what can be wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from automodel_rl.cli import main
from automodel_rl.config.load import ALGORITHMS
from automodel_rl.data.chat import open_chat_tokenizer
from automodel_rl.data.examples import RankedPairDataset
from automodel_rl.hf.opened_model import OpenedModel
from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, settings_of, train
from tests.rank_pool import RankPool

CENTRING = 0.01


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("reward", workspace, output, **changes)


def pairs_of(settings: Settings) -> list[list[torch.Tensor]]:
    """Token ids of the chosen and the rejected sequence of each training pair, in the order of the data."""
    config = ALGORITHMS["reward"].model_validate(settings)
    chat = open_chat_tokenizer(config, OpenedModel.open(config.model))
    dataset = RankedPairDataset(config.data.train, chat, config.batch, None, config.data)
    return [[sequence.input_ids for sequence in dataset[(0, number)].sequences] for number in range(96)]


def by_transformers(folder: Path, settings: Settings) -> list[float]:
    """Losses of the same steps by transformers and torch, one sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    pairs, losses = pairs_of(settings), []
    for step in range(6):
        of_step = pairs[16 * step : 16 * step + 16]
        scores = torch.stack([torch.cat([model(ids[None]).logits[0] for ids in pair]) for pair in of_step])
        loss = -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean() + CENTRING * (scores.sum(1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_learns_as_transformers_does_on_every_layout(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    train_data = {"train": [{"path": str(workspace / "train_pairs.jsonl")}], "shuffle": False}
    settings = values(workspace, tmp_path / "first", length={"steps": 1}, data=train_data)
    settings["optimizer"] = {"lr": 1e-12, "decay": "constant"}
    ranks(1).run(train, settings)  # a checkpoint with a linear head, and hardly a change
    settings = values(workspace, tmp_path / "one", length={"steps": 6}, data=train_data)
    settings["loss"] = {"centring": CENTRING}
    settings["model"]["path"] = str(tmp_path / "first" / "final")
    (expected,) = ranks(1).run(by_transformers, tmp_path / "first" / "final", settings)
    ranks(1).run(train, settings)
    ranks(2).run(train, settings | {"output": str(tmp_path / "two"), "parallel": {"tp": 2}})
    ranks(2).run(train, settings | {"output": str(tmp_path / "three"), "parallel": {"pp": 2}})
    for name in ("one", "two", "three"):
        losses = [row["train/loss"] for row in metrics_of(tmp_path / name)]
        assert losses[:3] == pytest.approx(expected[:3], rel=1e-11)
        # AdamW divides gradients that are zero but for rounding by their own size, and processors round differently.
        assert losses == pytest.approx(expected, rel=1e-5)


def by_trl(folder: Path, pairs: Path, output: Path) -> list[float]:
    """Losses of ten steps by TRL's trainer."""
    import trl
    from datasets import Dataset

    losses = []

    class InOrder(trl.RewardTrainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *given: Any, **options: Any) -> Any:
            loss = super().compute_loss(*given, **options)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    adam = {"learning_rate": 1e-3, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "max_grad_norm": 0.0}
    length = {"max_steps": 10, "per_device_train_batch_size": 8, "lr_scheduler_type": "constant", "max_length": None}
    plain = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no"}
    InOrder(
        model=AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64),
        args=trl.RewardConfig(output_dir=str(output), **adam, **length, **plain),
        train_dataset=Dataset.from_list([json.loads(line) for line in pairs.read_text().splitlines()]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    ).train()
    return losses


@pytest.mark.longer  # the test above asserts the same by transformers
def test_it_learns_as_trls_trainer_does(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    pairs = workspace / "train_pairs.jsonl"
    train_data = {"train": [{"path": str(pairs)}], "shuffle": False}
    settings = values(workspace, tmp_path / "first", length={"steps": 1}, data=train_data)
    settings["optimizer"] = {"lr": 1e-12, "decay": "constant"}
    ranks(1).run(train, settings)
    settings = values(workspace, tmp_path / "ours", length={"steps": 10}, data=train_data)
    settings["model"]["path"] = str(tmp_path / "first" / "final")
    settings["batch"] |= {"pairs": 8}
    settings["optimizer"] |= {"max_grad_norm": None}
    ranks(2).run(train, settings | {"parallel": {"dp_shard": 2}})
    expected = by_trl(tmp_path / "first" / "final", pairs, tmp_path / "theirs")
    assert [row["train/loss"] for row in metrics_of(tmp_path / "ours")] == pytest.approx(expected, rel=1e-10)


def test_it_starts_near_ln_2_and_tells_better_from_worse(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    ranks(1).run(train, values(workspace, tmp_path / "run"))
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["train/loss"] == pytest.approx(math.log(2), abs=0.3)
    assert rows[-1]["train/accuracy"] > 0.9
    assert rows[-1]["val/accuracy"] > 0.9
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


def test_padded_rows_score_in_transformers_as_single_ones(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    """The tokenizer pads with the token that ends rows, which transformers would take for padding."""
    ranks(1).run(train, values(workspace, tmp_path / "run", length={"steps": 1}))
    folder = tmp_path / "run" / "final"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": said}] for said in ("1", "2 3")
    ]
    ids = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
    alone = torch.cat([model(torch.tensor([row])).logits for row in ids])
    for side in ("left", "right"):
        rows = tokenizer.pad({"input_ids": ids}, padding_side=side, return_tensors="pt")
        torch.testing.assert_close(model(**rows).logits, alone)


def test_adapters_keep_their_head_for_peft(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", checkpoint={"every_steps": 6})
    settings["model"] |= {"lora": {"rank": 2}}
    ranks(2).run(train, settings | {"parallel": {"pp": 2}})
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    folder = tmp_path / "run" / "final"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    merged = tmp_path / "merged"
    assert main(["export", str(tmp_path / "run" / "checkpoints" / "step_6"), str(merged), "--merge"]) == 0
    adapted = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64)
    assert main(["export", str(folder), str(tmp_path / "again"), "--merge"]) == 0
    heads = [load_file(f / "model.safetensors")["score.weight"].double() for f in (merged, tmp_path / "again")]
    torch.testing.assert_close(*heads, rtol=1e-6, atol=1e-7)
    whole = AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float64)
    for pair in pairs_of(values(workspace, tmp_path / "x"))[:2]:
        for ids in pair:
            ours, theirs = (model(input_ids=ids[None]).logits for model in (whole, adapted))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_margin_comes_from_the_data(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    lines = (workspace / "train_pairs.jsonl").read_text().splitlines()
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(json.loads(line) | {"by": 3.0}) for line in lines) + "\n")
    settings = values(workspace, tmp_path / "run", length={"steps": 1})
    settings["data"] = {"train": [{"path": str(path), "columns": {"margin": "by"}}], "shuffle": False}
    ranks(1).run(train, settings)
    (row,) = metrics_of(tmp_path / "run")
    assert row["train/loss"] == pytest.approx(-math.log(1 / (1 + math.exp(3))), abs=0.4)


def spoil(settings: Settings, folder: Path, **changes: Any) -> None:
    path = folder / "pairs.jsonl"
    record = {"prompt": "How many?", "chosen": "Two.", "rejected": "Three."} | changes
    path.write_text(json.dumps(record) + "\n")
    settings["data"] = {"train": [{"path": str(path)}]}


BAD: list[tuple[Callable[[Settings, Path], None], str]] = [
    (lambda s, f: spoil(s, f, margin="much"), "pairs.jsonl:1: margin is 'much': use a finite number"),
    (lambda s, _: s["model"].update(num_labels=3), "model.num_labels=3: a reward model returns one score: remove it"),
    (lambda s, _: s["data"].update(overlong="truncate"), "data.overlong"),
]


@pytest.mark.parametrize(("spoil_settings", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_said_in_one_line(
    workspace: Path,
    tmp_path: Path,
    one_rank: None,
    capsys: pytest.CaptureFixture[str],
    spoil_settings: Callable[[Settings, Path], None],
    message: str,
) -> None:
    settings = values(workspace, tmp_path / "run")
    spoil_settings(settings, tmp_path)
    assert_refused("reward", settings, message, tmp_path, capsys)
