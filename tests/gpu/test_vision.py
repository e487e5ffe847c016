"""Encoder and language model on meshes of their own over NCCL: against plain transformers in float64, and in bf16."""

from itertools import product
from pathlib import Path

import pytest
import torch

from automodel_rl.batch import pack_microbatch
from automodel_rl.config import ModelConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig, one_layout
from automodel_rl.engine import Engine
from automodel_rl.model.handle import ModelHandle
from automodel_rl.tools.verify.comparison import Case
from automodel_rl.tools.verify.media import with_media
from automodel_rl.tools.verify.one_process import OneProcess, Training
from tests.distributed.model.test_vision import (
    LLAVA,
    ONE_TO_PIPELINE,
    ONE_TO_TWO,
    QWEN,
    SHARED,
    TWO_TO_ONE,
    assert_equal,
    components_of,
)
from tests.needs import need_gpus
from tests.rank_pool import RankPool
from tests.tiny import make_sequences, save_tiny_multimodal_model

pytestmark = pytest.mark.gpu
SIDE_BY_SIDE = components_of({"ranks": 0}, {"ranks": 1})
PLACEMENTS = [
    SIDE_BY_SIDE,
    SHARED,
    one_layout(ParallelConfig(pp=2), ["vision"]),
    one_layout(ParallelConfig(dp_shard=2), ["vision"]),
    one_layout(ParallelConfig(cp=2), ["vision"]),
    ONE_TO_TWO,
    TWO_TO_ONE,
    ONE_TO_PIPELINE,
    components_of({"ranks": 0}, {"ranks": "1-3", "pp": 3}),
]
FURTHER = [
    ("gemma3", SIDE_BY_SIDE),
    ("gemma3", one_layout(ParallelConfig(cp=2), ["vision"])),
    ("qwen3_vl", one_layout(ParallelConfig(tp=2), ["vision"])),
    ("qwen2_audio", ComponentsConfig.model_validate({"audio": {"ranks": 0}, "language": {"ranks": 1}})),
    ("qwen2_5_omni_thinker", one_layout(ParallelConfig(tp=2, sequence_parallel=True), ["vision", "audio"])),
    (
        "qwen2_5_omni_thinker",
        ComponentsConfig.model_validate({"vision": {"ranks": 1}, "audio": {"ranks": 0}, "language": {"ranks": 1}}),
    ),
]


def needs(components: ComponentsConfig) -> int:
    need_gpus(components.world_size)
    return components.world_size


@pytest.mark.parametrize(("family", "components"), [*product([LLAVA, QWEN], PLACEMENTS), *FURTHER], ids=str)
def test_float64_equals_transformers(
    ranks: RankPool, tmp_path: Path, family: str, components: ComponentsConfig
) -> None:
    needs(components)
    save_tiny_multimodal_model(tmp_path, family)
    assert_equal(ranks, tmp_path, Case(microbatches=(3, 2), components=components))


def difference_in_bf16(folder: Path, components: ComponentsConfig) -> float:
    """Mean absolute difference of log-probabilities to transformers, with the kernels of 16 bits on both components."""
    handle = ModelHandle.from_pretrained(ModelConfig(path=str(folder)), components=components)
    sequences = [with_media(s, handle.whole_config, n + 1) for n, s in enumerate(make_sequences(6, 0))]
    microbatches = [] if handle.layout.is_outsider else [pack_microbatch(sequences)]
    found = Engine(handle).logprobs(microbatches)
    expected = OneProcess(folder, torch.bfloat16, Training(), handle.layout.device)
    with torch.no_grad():
        gaps = [
            (own.cpu() - expected.logprobs(s).float().cpu()).abs() for own, s in zip(found, sequences, strict=False)
        ]
    return torch.cat(gaps).mean().item() if gaps else 0.0


@pytest.mark.parametrize(
    ("family", "components"),
    [
        (LLAVA, SIDE_BY_SIDE),
        (QWEN, SIDE_BY_SIDE),
        ("qwen2_audio", one_layout(ParallelConfig(dp_shard=2), ["audio"])),
        ("qwen2_5_omni_thinker", one_layout(ParallelConfig(dp_shard=2), ["vision", "audio"])),
    ],
    ids=str,
)
def test_kernels_of_16_bits_agree_with_transformers(
    ranks: RankPool, tmp_path: Path, family: str, components: ComponentsConfig
) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    assert max(ranks(needs(components)).run(difference_in_bf16, tmp_path, components)) < 0.02
