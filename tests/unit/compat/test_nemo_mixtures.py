"""Mixtures of nemo_automodel: their parameters, and the configs that their classes read otherwise than transformers."""

from typing import Any

import pytest
import torch

from automodel_rl.errors import InputError
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.model.build import build_empty_model
from tests.needs import needs_nemo
from tests.tiny import tiny_config

pytestmark = needs_nemo

MIXTURES = [name for name, family in TEXT_FAMILIES.items() if family.nemo_class is not None and family.is_moe]


def build(family: str, implementation: Any, **changes: Any) -> Any:
    config = tiny_config(family, **changes)
    return build_empty_model(config, implementation, torch.float32, "automodel_rl_eager", untie=False).language


@pytest.mark.parametrize("family", MIXTURES)
def test_parameters_have_the_names_and_shapes_of_transformers(family: str) -> None:
    shapes = [
        {name: tensor.shape for name, tensor in build(family, implementation).state_dict().items()}
        for implementation in ("transformers", "nemo_automodel")
    ]
    assert shapes[0] == shapes[1]


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"rope_parameters": LINEAR}, "its class has (no rotary|rotary frequencies that differ)"),
        ("qwen3_moe", {"rope_parameters": LLAMA3}, "its class has (no rotary|rotary frequencies that differ)"),
        ("deepseek_v3", {"rope_parameters": LINEAR}, "its class has rotary frequencies that differ"),
        ("qwen3_moe", {"tie_word_embeddings": True}, "its mixtures do not tie the head to the embedding"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "its mixtures use SiLU for hidden_act=gelu"),
        ("deepseek_v3", {"rope_interleave": False}, "its class rotates adjacent dims"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "its routers do not normalise"),
        (
            "deepseek_v3",
            {"attention_bias": True},
            "its class and that of transformers differ in model.layers.0.self_attn",
        ),
    ],
)
def test_what_the_class_would_compute_otherwise_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"model.implementation=nemo_automodel: {message}.*: use transformers"):
        build(family, "nemo_automodel", **changes)
    build(family, "transformers", **changes)
