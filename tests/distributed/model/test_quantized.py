"""Models whose checkpoints are quantized: loaded on layouts, trained, and exported as plain weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_rl import Engine, ModelHandle, OptimizerConfig, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.tools.export import export
from tests.quantized import save_fp8_model, save_mxfp4_model
from tests.rank_pool import RankPool
from tests.tiny import make_sequences


def losses_and_export(folder: Path, sizes: dict[str, Any], out: Path) -> list[float]:
    """Losses of two steps; between them the model is exported."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32"), ParallelConfig(**sizes))
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    microbatches = [pack_microbatch(make_sequences(3, seed=handle.layout.data_rank))]
    first = engine.train_step(microbatches, sft_loss).loss
    handle.save_pretrained(out)
    return [first, engine.train_step(microbatches, sft_loss).loss]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"tp": 2, "sequence_parallel": True, "ep": 2}),
        ("qwen3", {"dp_shard": 2}),
        ("gpt_oss", {"pp": 2}),
    ],
    ids=str,
)
def test_a_quantized_model_trains_as_its_plain_copy_does(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, Any]
) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    if family == "gpt_oss":
        save_mxfp4_model(quantized)
    else:
        save_fp8_model(quantized, family, by_rows=family == "qwen3")
    export(quantized, plain)
    run = ranks(ParallelConfig(**sizes).world_size).run
    (found, *_), (expected, *_) = (
        run(losses_and_export, folder, sizes, tmp_path / f"from_{folder.name}") for folder in (quantized, plain)
    )
    # The plain copy rounds products of value and scale to bfloat16.
    assert found == pytest.approx(expected, rel=2e-3)
    assert found[1] < found[0]
    exported = tmp_path / "from_quantized"
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(exported).dtype == torch.float32
