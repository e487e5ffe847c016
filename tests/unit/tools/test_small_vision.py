"""Small models of vision-language families: `verify` can train and `plan` can measure them."""

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3Config,
    Mistral3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.components import ComponentsConfig, one_layout
from automodel_rl.config.model import MemoryConfig
from automodel_rl.hf.read import read_config
from automodel_rl.tools.plan.encoders import plan_encoders
from automodel_rl.tools.plan.packing import PlannedPacking
from automodel_rl.tools.verify.comparison import make_sequences
from automodel_rl.tools.verify.media import with_media
from automodel_rl.tools.verify.one_process import OneProcess, Training
from automodel_rl.tools.verify.small_model import save_random_model, shrink_multimodal

CONFIGS = [Qwen2_5_VLConfig, Qwen3VLConfig, Qwen3VLMoeConfig, Mistral3Config, Gemma3Config]
MODEL = ModelConfig(path="x")


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_family_shrinks_to_a_model_that_sees(tmp_path: Path, kind: type[PretrainedConfig]) -> None:
    config = kind()
    config.text_config.num_hidden_layers = 4
    if "layer_types" in config.text_config.to_dict():
        config.text_config.layer_types = config.text_config.layer_types[:4]
    if kind is not Gemma3Config:
        rope = {"rope_type": "default", "rope_theta": 1e6}
        sections = {"mrope_section": [16, 24, 24]} if kind is Qwen2_5_VLConfig else {}
        config.text_config.rope_parameters = rope | sections
    setattr(config.vision_config, "num_hidden_layers" if kind in (Mistral3Config, Gemma3Config) else "depth", 4)
    if "deepstack_visual_indexes" in config.vision_config.to_dict():
        config.vision_config.deepstack_visual_indexes = [0, 1, 2]
    save_random_model(shrink_multimodal(config, ParallelConfig(), tp=2), tmp_path, torch.float64)
    small = read_config(tmp_path)
    model = OneProcess(tmp_path, torch.float64, Training(), torch.device("cpu"))
    (sequence,) = make_sequences(1, 0, small.text_config.vocab_size)
    assert model.logprobs(with_media(sequence, small, 2)).isfinite().all()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_activations_of_an_encoder_grow_with_its_images(kind: type[PretrainedConfig]) -> None:
    components = one_layout(ParallelConfig(), ["vision"])
    found = [
        plan_encoders(
            kind(),
            ModelConfig(path="x"),
            MemoryConfig(),
            components,
            PlannedPacking(1, None, {"vision": patches}),
            OptimizerConfig(),
        )["vision"]
        for patches in (1000, 2000)
    ]
    assert found[1].activations == pytest.approx(2 * found[0].activations, rel=1e-3)
    assert found[0].activations > 10**8
    assert found[0].parameters > (9 * 10**7 if kind is Gemma3Config else 10**8)  # transformers' default is SigLIP base


def test_an_encoder_on_ranks_of_its_own_keeps_what_it_is_ahead() -> None:
    """Also where the schedule runs more microbatches than there are."""
    interleaved = {"ranks": "1-2", "pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}
    apart = ComponentsConfig.model_validate({"vision": {"ranks": 0}, "language": interleaved})
    together = ComponentsConfig.model_validate({"vision": {"ranks": 0}, "language": {"ranks": 0}})
    planned = [
        plan_encoders(
            Qwen3VLConfig(),
            ModelConfig(path="x"),
            MemoryConfig(),
            components,
            PlannedPacking(count, None, {"vision": 6000}),
            OptimizerConfig(),
        )["vision"].activations
        for components, count in ((together, 5), (apart, 5), (apart, 60))
    ]
    assert planned[0] >= planned[1] > 4 * planned[2] > 0
