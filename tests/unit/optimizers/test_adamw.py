"""What AdamW is made with, and which weights decay."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_rl.config import OptimizerConfig
from automodel_rl.config.optimizer import ParameterGroupConfig
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.optimizers.description import LR_FACTOR
from tests.tiny import save_tiny_model


def no_groups(axis: str) -> NoReturn:
    raise AssertionError(f"{axis}: one process has no groups")


def test_matrices_decay_and_norms_and_biases_do_not_also_those_of_experts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt_oss", num_layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    (optimizer,) = OPTIMIZERS["adamw"].build(model, OptimizerConfig(lr=0.1, weight_decay=0.5), no_groups)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1.0), rtol=1e-12, atol=0)
    assert any(name.endswith("gate_up_proj_bias") for name in before)


def test_adamw_has_the_settings_of_the_config() -> None:
    model = torch.nn.Linear(2, 3)
    config = OptimizerConfig(lr=0.1, betas=(0.7, 0.8), eps=0.3, weight_decay=0.5)
    (optimizer,) = OPTIMIZERS["adamw"].build(model, config, no_groups)
    settings = [{key: group[key] for key in ("lr", "betas", "eps")} for group in optimizer.param_groups]
    assert settings == [{"lr": 0.1, "betas": (0.7, 0.8), "eps": 0.3}] * 2
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()  # by hand: both averages are those of one gradient
    for parameter, old, decay in zip(model.parameters(), before, (0.5, 0.0), strict=True):
        expected = old * (1 - 0.1 * decay) - 0.1 * 0.2 / (0.2 + 0.3)
        torch.testing.assert_close(parameter.detach(), expected)


def test_groups_have_their_own_rates_and_decay_and_the_first_that_names_a_parameter_counts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    groups = (
        ParameterGroupConfig(names=("embed_tokens", "lm_head"), lr=0.01),
        ParameterGroupConfig(names=("layers.0.mlp", "*norm*"), lr=0.05, weight_decay=0.1),
        ParameterGroupConfig(names=("layers",), weight_decay=0.0),
    )
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, groups=groups)
    for kind in ("adamw", "muon"):
        parameter_groups = [
            group
            for optimizer in OPTIMIZERS[kind].build(model, config.model_copy(update={"name": kind}), no_groups)
            for group in optimizer.param_groups
        ]
        settings = {p: (g[LR_FACTOR] * 0.1, g["weight_decay"]) for g in parameter_groups for p in g["params"]}
        found = {name: settings[parameter] for name, parameter in model.named_parameters()}
        assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == pytest.approx((0.01, 0.5))
        assert found["model.layers.0.mlp.up_proj.weight"] == pytest.approx((0.05, 0.1))
        assert found["model.layers.1.input_layernorm.weight"] == pytest.approx((0.05, 0.0))  # norms never decay
        assert found["model.layers.1.mlp.up_proj.weight"] == pytest.approx((0.1, 0.0))
