"""Muon in one process takes the steps of torch.optim.Muon. Which weights are matrices is tested in test_roles.py."""

import pytest
import torch
from torch import nn

from automodel_rl.config import MuonConfig, OptimizerConfig
from automodel_rl.optimizers.muon import Muon, orthogonal
from automodel_rl.optimizers.muon_reference import PlainMuon
from tests.unit.optimizers.test_adamw import no_groups

SHAPES = [(8, 8), (5, 12), (33, 20)]
SETTINGS = [
    MuonConfig(),
    MuonConfig(momentum=0.7, nesterov=False, ns_steps=3),
    MuonConfig(lr=0.05, adjust_lr_fn="original"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_on_matrices_are_those_of_torch(settings: MuonConfig, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    muon = Muon(
        [*zip("abcdefgh", ours, strict=False)],
        OptimizerConfig(name="muon", lr=0.1, weight_decay=0.01, muon=settings),
        no_groups,
    )
    names = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
    expected = PlainMuon(
        theirs, lr=settings.lr or 0.1, weight_decay=0.01, **{name: getattr(settings, name) for name in names}
    )
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator, dtype=dtype)
            other.grad = own.grad.clone()
        muon.step()
        expected.step()
    for start, own, other in zip(starts, ours, theirs, strict=True):
        allowed = 1e-12 if dtype == torch.float64 else 0.01 * (start - own).abs().max()  # sums in bf16
        assert (own - other).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_expert_of_a_stack_is_a_matrix_of_its_own(dtype: torch.dtype) -> None:
    stack = nn.Parameter(torch.randn(3, 6, 4, dtype=dtype))
    other = nn.Parameter(stack.detach().clone())
    muon = Muon([("stack", stack)], OptimizerConfig(name="muon", lr=0.1, weight_decay=0.1), no_groups)
    plain = PlainMuon([other], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        stack.grad = torch.randn_like(stack)
        other.grad = stack.grad.clone()
        muon.step()
        plain.step()
    torch.testing.assert_close(stack, other, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-3)


def test_a_transposed_stack_takes_the_steps_of_its_transpose() -> None:
    settings = MuonConfig(adjust_lr_fn="original")
    config = OptimizerConfig(name="muon", lr=0.1, weight_decay=0.1, muon=settings)
    stack = nn.Parameter(torch.randn(3, 4, 12, dtype=torch.float64))
    other, plain = nn.Parameter(stack.detach().mT.clone()), nn.Parameter(stack.detach().clone())
    muons = [Muon([("stack", stack)], config, no_groups, ["stack"]), Muon([("other", other)], config, no_groups)]
    muons.append(PlainMuon([plain], [plain], lr=0.1, weight_decay=0.1, adjust_lr_fn="original"))
    for _ in range(2):
        stack.grad = torch.randn_like(stack)
        other.grad, plain.grad = stack.grad.mT.clone(), stack.grad.clone()
        for muon in muons:
            muon.step()
    torch.testing.assert_close(stack, other.mT, rtol=0, atol=1e-12)
    torch.testing.assert_close(stack, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_of_a_step_in_float64_lie_around_1(shape: tuple[int, int]) -> None:
    direction = orthogonal(torch.randn(shape, dtype=torch.float64), num_steps=8)
    values = torch.linalg.svdvals(direction)
    assert direction.dtype == torch.float64
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_matrix_without_gradient_takes_no_step() -> None:
    still, moved = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    muon = Muon([("still", still), ("moved", moved)], OptimizerConfig(name="muon", lr=0.1, weight_decay=0.5), no_groups)
    moved.grad = torch.randn(2, 3)
    muon.step()
    assert torch.equal(still, torch.ones(2, 3))
    assert not muon.state[still]
    assert not torch.equal(moved, torch.ones(2, 3))
