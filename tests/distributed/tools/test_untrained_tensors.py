"""Layers of a checkpoint that predict further tokens (MTP) are not trained, and every export keeps them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from automodel_rl.cli import main
from tests.distributed.trainers.runs import settings_of, train
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

LAYER = ["embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "self_attn.q_proj.weight"]
NAMES = {
    "deepseek_v3": [
        f"model.layers.4.{name}" for name in [*LAYER, "mlp.experts.0.gate_proj.weight", "shared_head.norm"]
    ],
    "glm4_moe": [f"model.layers.4.{name}" for name in [*LAYER, "shared_head.head.weight"]],
    "qwen3_next": ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"],
    "qwen3": ["model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.0.token_layernorm.weight"],
}
"""Names that published checkpoints give to tensors of these layers."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def save_with_mtp(folder: Path, family: str, tokenizer: Path) -> dict[str, torch.Tensor]:
    """A checkpoint with such layers. Returns their tensors, of several dtypes."""
    texts = AutoTokenizer.from_pretrained(tokenizer)
    save_tiny_model(folder, family, vocab_size=len(texts), dtype=torch.float32)
    texts.save_pretrained(folder)
    dtypes = (torch.float32, torch.bfloat16)
    further = {name: torch.randn(6, 4).to(dtypes[number % 2]) for number, name in enumerate(NAMES[family])}
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **further}, file, {"format": "pt"})
    return further


@pytest.mark.parametrize("family", NAMES)
def test_exports_of_a_pipeline_keep_every_tensor(ranks: RankPool, workspace: Path, tmp_path: Path, family: str) -> None:
    further = save_with_mtp(tmp_path / "model", family, workspace / "model")
    settings = settings_of("sft", workspace, tmp_path / "run", length={"steps": 1}, parallel={"pp": 2})
    settings["model"]["path"] = str(tmp_path / "model")
    settings["observe"] = {"samples": 0}
    ranks(2).run(train, settings)
    assert main(["export", str(tmp_path / "run" / "checkpoints" / "step_1"), str(tmp_path / "out")]) == 0
    before = tensors_of(tmp_path / "model")
    for folder in (tmp_path / "run" / "final", tmp_path / "out"):
        after = tensors_of(folder)
        assert after.keys() == before.keys()
        for name, tensor in further.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor)
        assert any(not torch.equal(after[name], before[name]) for name in before.keys() - further.keys())


@pytest.mark.usefixtures("one_rank")
def test_a_merge_of_adapters_keeps_every_tensor(workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    further = save_with_mtp(tmp_path / "model", "qwen3", workspace / "model")
    settings = settings_of("sft", workspace, tmp_path / "run", length={"steps": 1})
    settings["model"] |= {"path": str(tmp_path / "model"), "lora": {"rank": 2}}
    settings["observe"] = {"samples": 0}
    train(settings)
    assert (
        "2 tensors of the checkpoint, such as model.mtp.layers.0.eh_proj.weight, belong to no part of the model: "
        in (capsys.readouterr().out)
    )
    for number, source in enumerate(("checkpoints/step_1", "final")):
        out = tmp_path / f"out_{number}"
        assert main(["export", str(tmp_path / "run" / source), str(out), "--merge"]) == 0
        after = tensors_of(out)
        assert after.keys() == tensors_of(tmp_path / "model").keys()
        for name, tensor in further.items():
            assert torch.equal(after[name].float(), tensor.float())
