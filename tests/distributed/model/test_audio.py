"""Models that hear: encoder of audio and language model on any meshes compute the numbers of one process."""

from pathlib import Path

import pytest

from automodel_rl.config import ParallelConfig
from automodel_rl.config.components import ComponentsConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.tools.verify.comparison import Case
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_multimodal_model
from tests.vision import assert_equal


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
            components=speaking({"ranks": "0-1", "pp": 2}, {"ranks": 2}, {"ranks": "3-4", "tp": 2}),
            frozen=("vision",),
        ),
    ],
    ids=["one rank", "pp and cp", "both beside pp", "one beside, one on the same ranks", "stages and tp, one frozen"],
)
def test_a_model_with_two_encoders_equals_one_process(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    save_tiny_multimodal_model(tmp_path, "qwen2_5_omni_thinker")
    assert_equal(ranks, tmp_path, case)
