"""Which weights decay."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from automodel_rl.config import OptimizerConfig
from automodel_rl.engine.optimizer import build_optimizer
from tests.tiny import save_tiny_model


def test_matrices_decay_and_norms_and_biases_do_not_also_those_of_experts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt_oss", num_layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decays = parameter.ndim >= 2 and not name.endswith("bias")
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1.0), rtol=1e-12, atol=0)
    assert any(name.endswith("gate_up_proj_bias") for name in before)
