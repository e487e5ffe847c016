"""Encoders over pipeline stages compute the numbers of one process."""

from pathlib import Path

import pytest

from automodel_rl.config import ModelConfig, OptimizerConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.tools.verify.comparison import Case
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_multimodal_model
from tests.vision import assert_equal, components_of, microbatches_of

LLAVA, QWEN, QWEN3, QWEN3_MOE = "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"
STAGES_TO_TWO = components_of({"ranks": "0-1", "pp": 2}, {"ranks": "2-3", "dp_shard": 2})
STAGES_TO_ONE = components_of({"ranks": "0-1", "pp": 2}, {"ranks": 2})
STAGES_TO_PIPELINE = components_of({"ranks": "0-3", "pp": 2, "tp": 2}, {"ranks": "4-5", "pp": 2})
STAGES_ON_ALL = components_of({"ranks": "0-1", "pp": 2}, {"ranks": "0-1", "tp": 2})
FOUR_STAGES = components_of({"ranks": "0-3", "pp": 4}, {"ranks": "4"})


@pytest.mark.parametrize(
    ("family", "components"),
    [
        (QWEN, STAGES_TO_PIPELINE),
        (QWEN3, STAGES_TO_PIPELINE),
        (QWEN3, FOUR_STAGES),
        (LLAVA, STAGES_TO_PIPELINE),
        (QWEN3_MOE, STAGES_TO_TWO),
        (LLAVA, STAGES_ON_ALL),
        (QWEN3, STAGES_ON_ALL),
        ("gemma3", STAGES_TO_TWO),
        ("mistral3", STAGES_TO_TWO),
    ],
    ids=str,
)
def test_stages_of_an_encoder_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, components: ComponentsConfig
) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    assert_equal(ranks, tmp_path, Case(microbatches=(3, 1, 4), components=components))


@pytest.mark.parametrize("frozen", [("vision",), ("projector",), ("vision", "projector"), ("language",)], ids=str)
def test_frozen_parts_leave_stages_right(ranks: RankPool, tmp_path: Path, frozen: tuple[str, ...]) -> None:
    """A stage before the last has projectors as well, of the features of its layers."""
    save_tiny_multimodal_model(tmp_path, QWEN3)
    assert_equal(ranks, tmp_path, Case(microbatches=(3, 1), components=STAGES_TO_ONE, frozen=frozen))


def train_and_export_stages(folder: Path, lora: LoraConfig | None) -> tuple[float, bool]:
    frozen = () if lora is not None else ("vision",)
    model = ModelConfig(path=str(folder), dtype="float64", frozen=frozen, lora=lora)
    handle = ModelHandle.from_pretrained(model, components=STAGES_TO_ONE)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    loss = engine.train_step(microbatches_of(engine, (2,)), sft_loss).loss
    sent = dict(handle.named_hf_tensors())  # before anything else could let go of gathered weights
    return loss, all(bool(tensor.isfinite().all()) for tensor in sent.values())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, targets=("q_proj", "projector"))], ids=["frozen", "lora"])
def test_a_stage_without_trained_weights_lets_go_of_them(
    ranks: RankPool, tmp_path: Path, lora: LoraConfig | None
) -> None:
    save_tiny_multimodal_model(tmp_path)
    found = ranks(3).run(train_and_export_stages, tmp_path, lora)
    assert len({loss for loss, _ in found}) == 1
    assert all(is_finite for _, is_finite in found)
