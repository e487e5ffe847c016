"""Language models inside of multimodal checkpoints: trained alone, and exported with the rest as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

from automodel_rl import Engine, ModelHandle, OptimizerConfig, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.tools.verify.small_model import DRAWN_BUFFERS
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_lively, save_tiny_model, save_tiny_multimodal_model
from tests.tiny_families import SIZES, of_layers

LANGUAGE = ("model.language_model.", "language_model.", "lm_head.")
"""Beginnings of the names of tensors that are trained."""


TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k25": ("deepseek_v3", {"num_attention_heads": 2, "num_hidden_layers": 1}),
}
"""Models whose encoders are not known here: their language model, and sizes of their encoder of images."""


UNSEEN: tuple[tuple[str, dict[str, Any]], ...] = (("kimi_k25", {"cp": 2}),)


def save_composite(folder: Path, family: str) -> None:
    """A multimodal checkpoint, with a layer that predicts further tokens."""
    if family in TEXT_PARTS:
        language, vision = TEXT_PARTS[family]
        text = {**of_layers(SIZES[language], 2), "model_type": language}
        vision = {"hidden_size": 16, "intermediate_size": 32, "patch_size": 4, **vision}
        config = AutoConfig.for_model(family, text_config=text, vision_config=vision)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float64)
        save_lively(model, folder, torch.float32, plain_norms=True)
    else:
        save_tiny_multimodal_model(folder, family, num_layers=2, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    if family == "kimi_k25":  # transformers 5.18 writes other names than it reads
        tensors = {
            name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
            for name, tensor in tensors.items()
        }
    save_file({**tensors, "mtp.norm.weight": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})


def train(folder: Path, sizes: dict[str, Any], out: Path) -> float:
    model = ModelConfig(path=str(folder), dtype="float32", text_only=True)
    handle = ModelHandle.from_pretrained(model, ParallelConfig(**sizes))
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    loss = engine.train_step([pack_microbatch(make_sequences(3, seed=0))], sft_loss).loss
    handle.save_pretrained(out)
    return loss


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_5", {"pp": 2}),
        ("qwen3_5_moe", {"tp": 2}),
        ("gemma3", {"cp": 2}),
        ("mistral3", {"tp": 2}),
        ("gemma4", {"pp": 2}),
        *UNSEEN,
    ],
    ids=str,
)
def test_the_language_model_is_trained_and_the_rest_is_kept(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, Any]
) -> None:
    folder = tmp_path / "composite"
    save_composite(folder, family)
    layouts: tuple[dict[str, Any], ...] = ({}, sizes)
    exports = [tmp_path / f"out_{len(sizes)}" for sizes in layouts]
    losses = [
        ranks(ParallelConfig(**sizes).world_size).run(train, folder, sizes, out)[0]
        for sizes, out in zip(layouts, exports, strict=True)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    before, alone, spread = (
        {name: tensor for file in sorted(place.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for place in (folder, *exports)
    )
    assert before.keys() == alone.keys() == spread.keys()
    for name, tensor in before.items():
        is_trained = name.startswith(LANGUAGE) and not name.endswith(tuple(DRAWN_BUFFERS))
        assert torch.equal(alone[name], tensor) != is_trained, name
        torch.testing.assert_close(spread[name], alone[name], rtol=0, atol=2e-3)
    ids = make_sequences(1, seed=0)[0].input_ids[None]
    first, second = (AutoModelForMultimodalLM.from_pretrained(place)(ids).logits for place in exports)
    torch.testing.assert_close(first, second, rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen3_vl", r"model.text_only: 'qwen3_vl_text', the language model of 'qwen3_vl', is not a standalone model"),
        ("llama", r"model.text_only: a 'llama' model reads text only: remove it"),
    ],
)
def test_models_without_a_text_model_within_are_refused(tmp_path: Path, family: str, message: str) -> None:
    (save_tiny_model if family == "llama" else save_tiny_multimodal_model)(tmp_path, family, num_layers=2)
    with pytest.raises(InputError, match=message):
        ModelHandle.from_pretrained(ModelConfig(path=str(tmp_path), text_only=True))
