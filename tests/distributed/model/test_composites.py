"""Language models inside of vision-language checkpoints: trained alone, and exported with the rest as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from automodel_rl import Engine, ModelHandle, OptimizerConfig, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, ParallelConfig
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_lively
from tests.tiny_families import SIZES, of_layers

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
IMAGE_TOKENS = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}


def save_composite(folder: Path, family: str) -> None:
    text = {**of_layers(SIZES[f"{family}_text"], 2), "model_type": f"{family}_text"}
    config = AutoConfig.for_model(family, text_config=text, vision_config=VISION, **IMAGE_TOKENS)
    save_lively(
        AutoModelForImageTextToText.from_config(config, dtype=torch.float64), folder, torch.float32, plain_norms=False
    )
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.norm.weight": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})


def train(folder: Path, sizes: dict[str, Any], out: Path) -> float:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32"), ParallelConfig(**sizes))
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    loss = engine.train_step([pack_microbatch(make_sequences(3, seed=0))], sft_loss).loss
    handle.save_pretrained(out)
    return loss


@pytest.mark.parametrize(("family", "sizes"), [("qwen3_5", {"pp": 2}), ("qwen3_5_moe", {"tp": 2})], ids=str)
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
        is_trained = name.startswith(("model.language_model.", "lm_head."))
        assert torch.equal(alone[name], tensor) != is_trained, name
        torch.testing.assert_close(spread[name], alone[name], rtol=0, atol=2e-3)
    ids = make_sequences(1, seed=0)[0].input_ids[None]
    first, second = (AutoModelForImageTextToText.from_pretrained(place)(ids).logits for place in exports)
    torch.testing.assert_close(first, second, rtol=0, atol=0.1)
