"""AdamW with moments in 8 bits learns as AdamW does, and keeps little."""

import pytest
import torch
from torch import Tensor, nn

from automodel_rl.config import OptimizerConfig
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.optimizers import OPTIMIZERS, ModelOptimizer
from automodel_rl.quantized.dynamic_codes import decode, value_bytes
from tests.unit.optimizers.test_adamw import no_groups


def least_squares(name: OptimizerName, steps: int) -> float:
    """The loss after some steps on a matrix [128, 64] with noise, a root mean square."""
    torch.manual_seed(0)
    model = nn.Linear(64, 128, bias=False)
    inputs = torch.randn(512, 64)
    targets = inputs @ torch.randn(64, 128) * 0.3 + 0.05 * torch.randn(512, 128)
    config = OptimizerConfig(name=name, lr=1e-2, betas=(0.9, 0.999))
    optimizer = ModelOptimizer([(model, no_groups, config)], OPTIMIZERS, config.lr)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = (model(inputs) - targets).square().mean()
        model.zero_grad()
        loss.backward()
        optimizer.step(config.lr)
    return loss.sqrt().item()


def test_it_learns_as_adamw_does() -> None:
    assert least_squares("adamw", 200) < 0.06
    assert least_squares("adamw_8bit", 200) == pytest.approx(least_squares("adamw", 200), rel=0.05)


def test_a_second_moment_that_is_small_in_its_block_is_not_taken_for_zero() -> None:
    """Its step would be that of a weight without a history, some hundred times as long."""
    model = nn.Linear(128, 1, bias=False)
    model.weight.data.zero_()
    config = OptimizerConfig(name="adamw_8bit", lr=1e-3)
    optimizer = ModelOptimizer([(model, no_groups, config)], OPTIMIZERS, config.lr)
    gradient = torch.logspace(-5, 0, 128)[None]  # so the smallest second moment is 1e-10 of the largest
    for _ in range(20):
        model.weight.grad = gradient.clone()
        optimizer.step(config.lr)
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 128), -0.02), rtol=0.5, atol=0)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_moments_follow_gradients_that_change(beta2: float) -> None:
    """In a step they change by less than the distance of two codes, and the nearest one would hold them."""
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 0, 256)[None]
    models = [nn.Linear(256, 1, bias=False) for _ in range(2)]
    roots = []
    for model, name in zip(models, ("adamw_8bit", "adamw"), strict=True):
        config = OptimizerConfig(name=name, lr=1e-3, betas=(0.9, beta2))  # type: ignore[arg-type]
        optimizer = ModelOptimizer([(model, no_groups, config)], OPTIMIZERS, config.lr)
        torch.manual_seed(1)
        for step in range(800):
            now = sizes.clone()
            now[:, ::2] *= 0.1 if step >= 200 else 1.0
            model.weight.grad = now * torch.randn(1, 256)
            optimizer.step(config.lr)
        state = optimizer.state_of(model.weight)
        if name == "adamw":
            roots.append(state["exp_avg_sq"].sqrt())
        else:
            root = state["exp_avg_sq_root"], state["exp_avg_sq_root_scales"]
            roots.append(decode(*root, is_signed=False, dtype=torch.float32))
    ratio = roots[0] / roots[1]
    assert ratio.median().item() == pytest.approx(1.0, abs=0.05)
    assert ratio.quantile(0.05) > 0.7
    assert ratio.quantile(0.95) < 1.4


def test_a_weight_has_two_bytes_of_moments_and_a_part_of_their_scales() -> None:
    names = OPTIMIZERS["adamw_8bit"].state_names(nn.Linear(256, 8))
    assert sum(names["weight"].sizes(torch.empty(8, 256))) == 4 + 8 * 256 * names["weight"].value_bytes(
        torch.float32, (8, 256)
    )
    assert names["weight"].value_bytes(torch.float32, (8, 256)) == 2 * value_bytes(256)
    assert names["bias"].value_bytes(torch.float32, (8,)) == 8
    short = OPTIMIZERS["adamw_8bit"].state_names(nn.Linear(16, 10))["weight"]
    assert sum(short.sizes(torch.empty(10, 16))) == 4 + 160 * short.value_bytes(torch.float32, (10, 16))


def test_the_reference_takes_the_same_steps() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(300, 4, bias=False, dtype=torch.float64) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = OptimizerConfig(name="adamw_8bit", lr=1e-2, weight_decay=0.1)
    optimizer = ModelOptimizer([(models[0], no_groups, config)], OPTIMIZERS, config.lr)

    def run() -> list[Tensor]:
        return [models[1](torch.randn(2, 300, dtype=torch.float64))]

    (reference, *_) = OPTIMIZERS["adamw_8bit"].reference(models[1], config, run)
    for step in range(8):
        torch.manual_seed(step)
        for model in models:
            torch.manual_seed(step)
            model.weight.grad = torch.randn(4, 300, dtype=torch.float64)
        optimizer.step(config.lr)
        reference.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-9, atol=1e-12)
