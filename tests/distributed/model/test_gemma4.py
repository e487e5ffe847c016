"""Gemma 4's small models: layers with embeddings of their own, which take keys and values of earlier layers; with
images, and with an encoder of audio, which is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM

from automodel_rl import Engine, ModelHandle, OptimizerConfig, sft_loss
from automodel_rl.batch import pack_microbatch
from automodel_rl.config import MemoryConfig, ModelConfig, ParallelConfig
from automodel_rl.errors import InputError
from automodel_rl.tools.verify.command import FLOAT32, judge
from automodel_rl.tools.verify.comparison import Case, compare
from automodel_rl.tools.verify.media import with_media
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_model, save_tiny_multimodal_model

SMALL: dict[str, Any] = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "enable_moe_block": False,
    "num_experts": None,
    "attention_k_eq_v": False,
}
"""What E2B and E4B have besides the large models."""


@pytest.mark.parametrize(
    ("sizes", "recomputed"),
    [
        ({}, "selective"),
        ({"cp": 2}, "full"),
        ({"tp": 2}, "none"),
        ({"tp": 2, "sequence_parallel": True}, "full"),
        ({"dp_shard": 2}, "full"),
    ],
    ids=str,
)
def test_small_models_equal_one_process(ranks: RankPool, tmp_path: Path, sizes: dict, recomputed: Any) -> None:
    save_tiny_model(tmp_path, "gemma4_text", tied=True, **SMALL)
    parallel, memory = ParallelConfig(**sizes), MemoryConfig(activation_checkpointing=recomputed)
    found = ranks(parallel.world_size).run(compare, Case(parallel, (3, 1, 2), memory=memory), tmp_path, tmp_path)[0]
    different = [row for row in judge(found, FLOAT32) if not row.is_equal]
    assert not different, different


def test_a_pipeline_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gemma4_text", **SMALL)
    with pytest.raises(InputError, match=r"parallel.pp=2: layers of this 'gemma4_text' model take keys and values of"):
        ModelHandle.from_pretrained(ModelConfig(path=str(tmp_path)), ParallelConfig(pp=2))


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}], ids=str)
def test_small_models_see_images_as_one_process(ranks: RankPool, tmp_path: Path, sizes: dict) -> None:
    """Layers take a pad's own embeddings for an image's tokens, which see nothing later."""
    text = {**SMALL, "use_bidirectional_attention": None}
    save_tiny_multimodal_model(tmp_path, "gemma4", tied=True, text=text)
    parallel = ParallelConfig(**sizes)
    found = ranks(parallel.world_size).run(compare, Case(parallel, (3, 1, 4)), tmp_path, tmp_path)[0]
    different = [row for row in judge(found, FLOAT32) if not row.is_equal]
    assert not different, different


AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}


def train_with_an_image(folder: Path, out: Path) -> None:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder), dtype="float32"))
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    (sequence,) = make_sequences(1, seed=0)
    engine.train_step([pack_microbatch([with_media(sequence, handle.whole_config, 1)])], sft_loss)
    handle.save_pretrained(out)


def test_an_encoder_of_audio_is_kept_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path / "model", "gemma4", num_layers=2, dtype=torch.float32, audio=AUDIO)
    ranks(1).run(train_with_an_image, tmp_path / "model", tmp_path / "out")
    before, after = (AutoModelForMultimodalLM.from_pretrained(tmp_path / name) for name in ("model", "out"))
    assert after.config.audio_config.hidden_size == AUDIO["hidden_size"]
    kept = after.state_dict()
    assert kept.keys() == before.state_dict().keys()
    for name, tensor in before.state_dict().items():
        is_trained = "audio" not in name and name in dict(before.named_parameters())
        assert torch.equal(kept[name], tensor) != is_trained, name
