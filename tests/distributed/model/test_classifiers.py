"""Linear heads of every family that can have one: files and scores are those of transformers' own classes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from automodel_rl.batch import TokenSequence, in_packed_order, pack
from automodel_rl.config import MemoryConfig, ModelConfig, ParallelConfig
from automodel_rl.engine import Engine
from automodel_rl.families.classifier import as_classifier, classifier_families
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.model.handle import ModelHandle
from tests.rank_pool import RankPool
from tests.tiny import save_lively, tiny_config

LENGTHS = (5, 2, 9)


def rows_of() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(1, 90, (n,), generator=generator) for n in LENGTHS]
    return [TokenSequence(row, torch.ones(len(row), dtype=torch.bool)) for row in ids]


def scores_of_ours(folder: Path, copy: Path) -> list[Tensor]:
    opened = OpenedModel.open(ModelConfig(path=str(folder), dtype="float64", num_labels=3))
    handle = ModelHandle.load(opened, ParallelConfig(), MemoryConfig(), None)
    assert not handle.unused_tensors
    handle.save_pretrained(copy)
    microbatches = pack(rows_of(), capacity=16)
    return in_packed_order([piece[-1] for piece in Engine(handle).scores(microbatches)], microbatches)


@pytest.mark.parametrize("family", classifier_families())
def test_a_family_scores_as_in_transformers(ranks: RankPool, tmp_path: Path, family: str) -> None:
    config = as_classifier(tiny_config(family), 3)
    config.pad_token_id = 0  # of no row
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float64)
    assert type(model).__name__ == config.architectures[0]
    save_lively(model, tmp_path / "model", torch.float64, plain_norms="gemma" not in family)
    (ours,) = ranks(1).run(scores_of_ours, tmp_path / "model", tmp_path / "copy")
    for folder in ("model", "copy"):
        kinds = {"attn_implementation": "eager", "experts_implementation": "eager"}
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / folder, dtype=torch.float64, **kinds)
        for row, found in zip(rows_of(), ours, strict=True):
            expected = theirs(row.input_ids[None]).logits[0].detach()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
