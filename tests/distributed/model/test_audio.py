"""Models that hear: encoder of audio and language model on any meshes compute the numbers of one process."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen2_5OmniConfig

from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.tools.verify.comparison import Case
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_multimodal_model
from tests.vision import assert_equal, microbatches_of


def hearing(audio: dict, language: dict) -> ComponentsConfig:
    return ComponentsConfig.model_validate({"audio": audio, "language": language})


@pytest.mark.parametrize(
    "case",
    [
        Case(microbatches=(3, 2)),
        Case(ParallelConfig(pp=2), microbatches=(3, 2)),
        Case(ParallelConfig(cp=2), microbatches=(3, 2), frozen=("language",)),
        Case(ParallelConfig(tp=2, sequence_parallel=True), microbatches=(3, 2), frozen=("audio",)),
        Case(microbatches=(3, 2), memory=MemoryConfig(activation_checkpointing="full")),
        Case(microbatches=(3, 1), components=hearing({"ranks": 0}, {"ranks": "1-2", "pp": 2})),
        Case(
            microbatches=(3, 1),
            components=hearing({"ranks": "0-1", "dp_shard": 2}, {"ranks": "2-5", "dp_shard": 2, "pp": 2}),
        ),
        Case(microbatches=(3, 1), components=hearing({"ranks": "0-3", "dp_shard": 2, "dp_replicate": 2}, {"ranks": 4})),
    ],
    ids=[
        "one rank",
        "pp",
        "cp, frozen language model",
        "tp, frozen encoder",
        "recomputed",
        "1 beside pp 2",
        "2 beside 4",
        "4 beside 1",
    ],
)
def test_a_model_that_hears_equals_one_process(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    save_tiny_multimodal_model(tmp_path, "qwen2_audio")
    assert_equal(ranks, tmp_path, case)


def speaking(vision: dict, audio: dict, language: dict) -> ComponentsConfig:
    return ComponentsConfig.model_validate({"vision": vision, "audio": audio, "language": language})


@pytest.mark.parametrize(
    "case",
    [
        Case(microbatches=(3, 2)),
        Case(ParallelConfig(pp=2, cp=2), microbatches=(3, 2)),
        Case(microbatches=(3, 1), components=speaking({"ranks": 0}, {"ranks": 1}, {"ranks": "2-3", "pp": 2})),
        Case(
            microbatches=(3, 1),
            components=speaking(
                {"ranks": "2-5", "dp_shard": 4}, {"ranks": "0-1", "dp_shard": 2}, {"ranks": "2-5", "dp_shard": 4}
            ),
        ),
        Case(
            microbatches=(3, 1),
            components=speaking({"ranks": "0-1", "dp_shard": 2}, {"ranks": 2}, {"ranks": "3-4", "tp": 2}),
            frozen=("vision",),
        ),
    ],
    ids=["one rank", "pp and cp", "both beside pp", "one beside, one on the same ranks", "dp_shard and tp, one frozen"],
)
def test_a_model_with_two_encoders_equals_one_process(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    save_tiny_multimodal_model(tmp_path, "qwen2_5_omni_thinker")
    assert_equal(ranks, tmp_path, case)


def train_and_export(folder: Path, out: Path, components: ComponentsConfig | None) -> list[str]:
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder)), components=components)
    engine = Engine(handle, OptimizerConfig(lr=1e-2, decay="constant"))
    engine.train_step(microbatches_of(engine, (2,)), sft_loss)
    handle.save_pretrained(out)
    return handle.unused_tensors


def test_a_config_as_on_the_hub_does_not_say_whether_embeddings_are_tied(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path, "qwen2_audio")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equal(ranks, tmp_path, Case(microbatches=(1, 2)))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_the_thinker_of_a_whole_model_is_trained_and_the_rest_is_kept(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_multimodal_model(tmp_path / "thinker", "qwen2_5_omni_thinker", dtype=torch.float32)
    tensors = load_file(tmp_path / "thinker" / "model.safetensors")
    (tmp_path / "whole").mkdir()
    kept = torch.tensor([1.0001234, 1.0])  # not a number of bfloat16
    whole = {f"thinker.{name}": tensor for name, tensor in tensors.items()} | {"talker.norm.weight": kept}
    (tmp_path / "whole" / "spk_dict.pt").write_bytes(b"voices")
    save_file(whole, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    thinker = AutoConfig.from_pretrained(tmp_path / "thinker")
    Qwen2_5OmniConfig(thinker_config=thinker.to_dict()).save_pretrained(tmp_path / "whole")
    apart = speaking({"ranks": 0}, {"ranks": 1}, {"ranks": 2})
    for number, name, components in ((1, "one", None), (3, "apart", apart)):
        unused = ranks(number).run(train_and_export, tmp_path / "whole", tmp_path / name, components)
        assert unused[0] == ["talker.norm.weight"]
        exported = tensors_of(tmp_path / name)
        assert exported.keys() == whole.keys()
        assert torch.equal(exported["talker.norm.weight"], kept)
        assert (tmp_path / name / "spk_dict.pt").read_bytes() == b"voices"
        assert not torch.equal(exported["thinker.lm_head.weight"], whole["thinker.lm_head.weight"])
        assert AutoConfig.from_pretrained(tmp_path / name).model_type == "qwen2_5_omni"
    alone, spread = (tensors_of(tmp_path / name) for name in ("one", "apart"))
    for key, tensor in alone.items():
        torch.testing.assert_close(spread[key], tensor, rtol=0, atol=2e-2, msg=key)
