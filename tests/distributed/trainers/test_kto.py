"""Preference training on single completions, on every layout against transformers, and what can be wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_rl.config.load import ALGORITHMS
from automodel_rl.data.chat import open_chat_tokenizer
from automodel_rl.data.examples import LabelledDataset
from automodel_rl.hf.opened_model import OpenedModel
from tests.distributed.trainers.runs import Settings, assert_refused, metrics_of, settings_of, train
from tests.rank_pool import RankPool

LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "pp": {"pp": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "three data ranks": {"dp_shard": 3},
}
LOSS = {"desirable_weight": 1.2, "undesirable_weight": 0.7, "beta": 0.3}


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    settings = settings_of("kto", workspace, output, loss=LOSS)
    settings["data"] |= {"shuffle": False}
    return settings | changes


def rows_of(settings: Settings) -> list[tuple[Tensor, Tensor, bool]]:
    config = ALGORITHMS["kto"].model_validate(settings)
    chat = open_chat_tokenizer(config, OpenedModel.open(config.model))
    dataset = LabelledDataset(config.data.train, chat, config.batch, None, config.data)
    sequences = [dataset[(0, number)].sequences[0] for number in range(24)]
    return [(one.input_ids, one.loss_mask, bool(one.values["label"][0])) for one in sequences]


def score(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    logprobs = model(ids[None]).logits[0, :-1].log_softmax(1).gather(1, ids[1:, None])[:, 0]
    return logprobs[mask[1:]].sum()


def by_transformers(settings: Settings) -> list[float]:
    """Losses, gradient norms and reference points of the same steps, one sequence at a time."""
    model, reference = (
        AutoModelForCausalLM.from_pretrained(settings["model"]["path"], dtype=torch.float64) for _ in range(2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    rows, found = rows_of(settings), []
    for step in range(2):
        of_step = rows[12 * step : 12 * step + 12]
        with torch.no_grad():
            differences = []
            for place, (ids, mask, _) in enumerate(of_step):
                other, other_mask, _ = of_step[place - 1]
                start, from_there = int(mask.nonzero()[0, 0]), int(other_mask.nonzero()[0, 0])
                mixed = torch.cat([ids[:start], other[from_there:]])
                counted = torch.cat([torch.zeros(start) > 0, other_mask[from_there:]])
                differences.append(score(model, mixed, counted) - score(reference, mixed, counted))
            z = torch.stack(differences).mean().clamp_min(0)
        losses = []
        for ids, mask, is_good in of_step:
            with torch.no_grad():
                of_reference = score(reference, ids, mask)
            s = score(model, ids, mask) - of_reference
            gain = torch.sigmoid(0.3 * (s - z) if is_good else 0.3 * (z - s))
            losses.append((1.2 if is_good else 0.7) * (1 - gain))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [loss.item(), norm.item(), z.item()]
    return found


@pytest.fixture(name="expected", scope="module")
def make_expected(ranks: RankPool, workspace: Path) -> list[float]:
    found: list[float] = ranks(1).run(by_transformers, values(workspace, Path("none")))[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_as_by_transformers(
    ranks: RankPool, workspace: Path, tmp_path: Path, expected: list[float], layout: str
) -> None:
    sizes = LAYOUTS[layout]
    settings = values(workspace, tmp_path / "run", parallel=sizes)
    ranks(max([1, *sizes.values()])).run(train, settings)
    names = ("train/loss", "train/grad_norm", "train/reference_point")
    found = [row[name] for row in metrics_of(tmp_path / "run") for name in names]
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_good_completions_gain_and_bad_ones_lose(ranks: RankPool, workspace: Path, tmp_path: Path) -> None:
    settings = values(workspace, tmp_path / "run", length={"steps": 6})
    ranks(1).run(train, settings)
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["train/loss"] > rows[-1]["train/loss"]
    assert rows[-1]["val/reward_desirable"] > rows[-1]["val/reward_undesirable"] + 1
    assert rows[-1]["val/accuracy"] > 0.8


def spoil(settings: Settings, folder: Path, **changes: Any) -> None:
    path = folder / "judged.jsonl"
    record = {"prompt": "How many?", "completion": "Two.", "label": True} | changes
    path.write_text(json.dumps({key: value for key, value in record.items() if value is not None}) + "\n")
    settings["data"] = {"train": [{"path": str(path)}]}


BAD: list[tuple[Callable[[Settings, Path], None], str]] = [
    (lambda s, f: spoil(s, f, label=None), "judged.jsonl:1: no column 'label', only prompt, completion"),
    (lambda s, f: spoil(s, f, label="yes"), "judged.jsonl:1: label is 'yes': use true for a good completion"),
    (lambda s, _: s["batch"].update(sequences=1), "batch.sequences=1: the reference point comes from"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable,
    message: str,
) -> None:
    settings = values(workspace, tmp_path / "run")
    change(settings, tmp_path)
    assert_refused("kto", settings, message, tmp_path, capsys)
