"""Adapters of experts, for every family with experts."""

import pytest
import torch

from automodel_rl.config import ModelConfig
from automodel_rl.config.model import LoraConfig
from automodel_rl.errors import InputError
from automodel_rl.estimate.parameter_sizes import empty_parts
from automodel_rl.families.known import FAMILIES
from automodel_rl.families.text import TEXT_FAMILIES
from automodel_rl.lora.experts import STACKED, adapted_stacks, adapted_weight, adapted_weights_by_name
from automodel_rl.lora.layers import merged
from tests.tiny import tiny_config

MIXTURES = [family for family, known in TEXT_FAMILIES.items() if known.is_moe and family != "nemotron_h"]
"""Those of Nemotron-H have no gate, and get no adapters."""


def adapted(family: str, *targets: str) -> torch.nn.Module:
    model = ModelConfig(path="model", lora=LoraConfig(rank=4, targets=targets))
    return empty_parts(tiny_config(family), torch.float32, model)[0]


@pytest.mark.parametrize("family", MIXTURES)
def test_every_mixtures_experts_get_adapters_that_fit_their_weights(family: str) -> None:
    model = adapted(family, "experts")
    own = dict(model.named_parameters())
    layers = adapted_weights_by_name(own)
    stacks = [weight for weight, _ in adapted_stacks(model)]
    assert stacks
    assert {id(own[name]) for name in layers} == {id(weight) for weight in stacks}
    for name, layer in layers.items():
        weight, down, up = own[name], own[f"{layer}.lora_A.weight"], own[f"{layer}.lora_B.weight"]
        assert merged(weight, down, up, 1.0, FAMILIES[family].transposes_experts).shape == weight.shape
        assert (weight.requires_grad, down.requires_grad, up.requires_grad) == (False, True, True)


def test_bare_names_of_weights_do_not_mean_experts() -> None:
    with pytest.raises(InputError, match=r"targets=\['down_proj'\]: no linear layer .* nor do they match its experts"):
        adapted("qwen3_moe", *STACKED[1:])
    layers = adapted_weights_by_name(dict(adapted("qwen3_moe", "all-linear", "experts.down_proj").named_parameters()))
    assert {name.rpartition("layers.0.")[2] for name in layers if "layers.0." in name} == {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        "mlp.experts.down_proj",
    }


def test_an_adapter_belongs_to_a_layer_or_to_a_stacked_weight() -> None:
    assert adapted_weight("model.layers.1.mlp.down_proj") == "model.layers.1.mlp.down_proj.weight"
    assert adapted_weight("model.layers.1.mlp.experts.adapters.down_proj") == "model.layers.1.mlp.experts.down_proj"
