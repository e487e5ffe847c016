"""What AdamW is made with, and which weights decay."""

from pathlib import Path
from typing import NoReturn

import torch
from transformers import AutoModelForCausalLM

from automodel_rl.config import OptimizerConfig
from automodel_rl.optimizers import OPTIMIZERS
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
