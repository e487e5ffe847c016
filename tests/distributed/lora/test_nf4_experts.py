"""Adapters of mixtures whose linear layers and experts stay in nf4, against the same with bitsandbytes' dequantized
weights, in float64."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from automodel_rl.batch import pack_microbatch
from automodel_rl.config import MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.engine import Engine
from automodel_rl.estimate.parameter_sizes import empty_parts
from automodel_rl.hf.names import pieces
from automodel_rl.hf.read import read_whole_config
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.quantized.base import quantized_weights
from tests.distributed.lora.test_nf4 import dequantized
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model
from tests.unit.hf.test_bitsandbytes import checkpoint

OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=0.5, decay="constant")
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**WIDE, "head_dim": 16},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
    "deepseek_v3": {**WIDE, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16},
    "qwen2_moe": {**WIDE, "shared_expert_intermediate_size": 64},
}

Trained = tuple[list[float], dict[str, Tensor], set[str]]


def train(folder: Path, base: Literal["plain", "nf4"], parallel: ParallelConfig, memory: MemoryConfig) -> Trained:
    """Losses, the merged model, and the names in files of this rank's weights in nf4."""
    lora = LoraConfig(rank=4, targets=("all-linear", "experts"), base=base)
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float64", lora=lora), parallel, memory)
    engine, losses = Engine(handle, OPTIMIZER), []
    for step in range(3):
        rank = handle.layout.data_rank
        microbatches = [pack_microbatch(make_sequences(2 + rank, 10 * step + 5 * rank + m)) for m in range(2)]
        losses.append(engine.train_step(microbatches, sft_loss).loss)
    in_nf4 = {
        piece.name
        for part in handle.parts
        for name, held, _ in quantized_weights(part)
        for piece in pieces(name, tuple(held.plain().shape), handle.family)
    }
    return losses, {name: tensor.clone() for name, tensor in handle.named_hf_tensors()}, in_nf4


@pytest.mark.parametrize(
    ("family", "sizes", "memory"),
    [
        ("qwen3_moe", {}, {}),
        ("qwen3_moe", {"dp_shard": 2, "ep": 2}, {"activation_checkpointing": "full"}),
        ("qwen3_moe", {"dp_shard": 4, "ep": 2, "fsdp": "reshard"}, {"activation_checkpointing": "offload"}),
        ("qwen3_moe", {}, {"compile": True}),
        ("gpt_oss", {"pp": 2}, {}),
        ("gpt_oss", {"dp_shard": 2, "fsdp": "reshard"}, {"activation_checkpointing": "selective"}),
        ("deepseek_v3", {"cp": 2, "ep": 2}, {}),
        ("qwen2_moe", {"dp_shard": 3, "fsdp": "keep"}, {}),
    ],
)
def test_mixtures_train_as_with_dequantized_weights(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict, memory: dict
) -> None:
    folder, plain = tmp_path / "model", tmp_path / "plain"
    for each in (folder, plain):
        save_tiny_model(each, family, dtype=torch.float32, **SIZES[family])
    parallel, how = ParallelConfig(**sizes), MemoryConfig(**memory)
    found = ranks(parallel.world_size).run(train, folder, "nf4", parallel, how)
    in_nf4 = {name for *_, names in found for name in names}
    tensors = load_file(plain / "model.safetensors")
    assert sum(".experts." in name for name in in_nf4) >= 4
    assert not {name for name in in_nf4 if "router" in name or name.endswith("gate.weight")}
    save_file(
        {**tensors, **{name: dequantized(tensors[name]) for name in in_nf4}},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    expected = ranks(parallel.world_size).run(train, plain, "plain", parallel, how)
    rtol, atol = (1e-7, 1e-4) if memory.get("compile") else (1e-12, 1e-10)
    for (losses, merged, _), (expected_losses, expected_merged, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(expected_losses, rel=rtol)
        assert merged.keys() == expected_merged.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, expected_merged[name], rtol=0, atol=atol, msg=name)
    source = checkpoint(folder)  # as exports read it
    (part,) = empty_parts(read_whole_config(folder), torch.float64, ModelConfig(path=str(folder)))
    source.read_base_in_nf4(part, ())
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name), dequantized(tensor) if name in in_nf4 else tensor), name
    assert any(not torch.equal(dequantized(tensors[name]), tensors[name]) for name in in_nf4)
