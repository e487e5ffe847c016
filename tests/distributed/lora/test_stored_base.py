"""Adapters on a base that stays as the checkpoint has it: fp8, MXFP4 and nf4 compute as if they were read as plain."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from automodel_rl.batch import pack_microbatch
from automodel_rl.config import MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import Base, LoraConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.quantized.base import quantized_weights
from tests.quantized import save_fp8_model, save_mxfp4_model, save_nf4_model
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model

OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant")
Trained = tuple[list[float], dict[str, Tensor], dict[str, str]]


def train(folder: Path, base: Base, parallel: ParallelConfig, memory: MemoryConfig) -> Trained:
    """Losses, the merged model, and the formats of this rank's quantized weights."""
    lora = LoraConfig(rank=4, targets=("all-linear", "experts"), base=base)
    if "moe" not in folder.name and "mxfp4" not in folder.name:
        lora = lora.model_copy(update={"targets": ("all-linear",)})
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", lora=lora), parallel, memory)
    engine, losses = Engine(handle, OPTIMIZER), []
    for step in range(3):
        rank = handle.layout.data_rank
        microbatches = [pack_microbatch(make_sequences(2 + rank, 10 * step + 5 * rank + m)) for m in range(2)]
        losses.append(engine.train_step(microbatches, sft_loss).loss)
    formats = {name: held.quantized_format.format for part in handle.parts for name, held, _ in quantized_weights(part)}
    return losses, {name: tensor.clone() for name, tensor in handle.named_hf_tensors()}, formats


WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64}
"""Rows of a whole and a half block of fp8; halves of those that are cut by tp are whole blocks."""


def save(kind: str, folder: Path) -> None:
    """A checkpoint of a kind; its folder is named by it."""
    if kind == "mxfp4":
        save_mxfp4_model(folder)
    elif kind == "nf4":
        save_nf4_model(folder, is_nested=True)
    elif kind == "fp8 rows":
        save_fp8_model(folder, "qwen3", by_rows=True)
    else:
        save_fp8_model(folder, "qwen3_moe" if kind == "fp8 moe" else "qwen3", block=(24, 128), **WIDE)


@pytest.mark.parametrize(
    ("kind", "sizes", "memory"),
    [
        ("fp8", {}, {}),
        ("fp8", {"dp_shard": 3, "fsdp": "reshard"}, {"activation_checkpointing": "full"}),
        ("fp8 rows", {"pp": 2}, {"activation_checkpointing": "selective"}),
        ("fp8 moe", {"dp_shard": 2, "ep": 2}, {}),
        ("fp8 moe", {"cp": 2}, {"activation_checkpointing": "full"}),
        ("mxfp4", {}, {}),
        ("mxfp4", {"dp_shard": 2, "ep": 2}, {}),
        ("mxfp4", {"dp_shard": 2, "fsdp": "reshard"}, {"activation_checkpointing": "full"}),
        ("mxfp4", {"pp": 2}, {}),
        ("fp8", {"tp": 2}, {}),
        ("nf4", {"dp_shard": 2}, {}),
    ],
    ids=str,
)
def test_training_is_that_on_plain_weights(
    ranks: RankPool, tmp_path: Path, kind: str, sizes: dict, memory: dict
) -> None:
    folder, parallel = tmp_path / kind, ParallelConfig(**sizes)
    save(kind, folder)
    run = ranks(parallel.world_size).run
    kept, plain = (run(train, folder, base, parallel, MemoryConfig(**memory)) for base in ("stored", "plain"))
    formats = {name: of for *_, of_rank in kept for name, of in of_rank.items()}
    assert {*formats.values()} == {"mxfp4" if kind == "mxfp4" else "nf4" if kind == "nf4" else "fp8_e4m3"}
    assert len(formats) == {"mxfp4": 8, "fp8 moe": 24}.get(kind, 28)
    assert not any(of_rank for *_, of_rank in plain)
    for (losses, merged, _), (expected_losses, expected, _) in zip(kept, plain, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        assert merged.keys() == expected.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10, msg=name)


def test_compiled_layers_compute_alike(ranks: RankPool, tmp_path: Path) -> None:
    save("fp8", tmp_path / "fp8")
    losses = [
        ranks(1).run(train, tmp_path / "fp8", "stored", ParallelConfig(), MemoryConfig(compile=compiled))[0][0]
        for compiled in (True, False)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)


def bytes_of(folder: Path) -> dict[str, Tensor]:
    lora = LoraConfig(rank=4, targets=("experts",), base="stored")
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32", lora=lora))
    return {name: held.codes.detach().clone() for name, held, _ in quantized_weights(handle.parts[0])}


def test_codes_of_the_files_stay(ranks: RankPool, tmp_path: Path) -> None:
    save_mxfp4_model(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    codes = ranks(1).run(bytes_of, tmp_path)[0]
    assert len(codes) == 8
    assert all(torch.equal(of, stored[f"{name}_blocks"].flatten(-2)) for name, of in codes.items())


def refusal(folder: Path) -> str:
    lora = LoraConfig(rank=4, base="stored")
    with pytest.raises(InputError) as refused:
        ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32", lora=lora))
    return str(refused.value)


def test_other_blocks_and_plain_checkpoints_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    save_fp8_model(tmp_path / "narrow", "qwen3")
    text = ranks(1).run(refusal, tmp_path / "narrow")[0]
    assert text.startswith("model.lora.base=stored: ")
    assert "in blocks or parts that cannot be kept as stored: use base=plain, or nf4 if its rows" in text
    save_tiny_model(tmp_path / "plain", "qwen3")
    assert ranks(1).run(refusal, tmp_path / "plain")[0].startswith("model.lora.base=stored: the checkpoint has no")
