"""Muon in one process takes the steps of torch.optim.Muon, of those weights that are matrices."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from automodel_rl.config import MuonConfig, OptimizerConfig
from automodel_rl.optimizers import OPTIMIZERS
from automodel_rl.optimizers.muon import Muon, orthogonal
from automodel_rl.optimizers.muon_reference import PlainMuon
from tests.tiny import save_tiny_model, save_tiny_multimodal_model
from tests.tiny_families import SIZES
from tests.unit.optimizers.test_adamw import no_groups

SHAPES = [(8, 8), (5, 12), (33, 20)]
SETTINGS = [
    MuonConfig(),
    MuonConfig(momentum=0.7, nesterov=False, ns_steps=3),
    MuonConfig(lr=0.05, adjust_lr_fn="original"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_on_matrices_in_float32_are_those_of_torch_bit_for_bit(settings: MuonConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    muon = Muon(
        [*zip("abcdefgh", ours, strict=False)],
        OptimizerConfig(name="muon", lr=0.1, weight_decay=0.01, muon=settings),
        no_groups,
    )
    names = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
    expected = torch.optim.Muon(
        theirs, lr=settings.lr or 0.1, weight_decay=0.01, **{name: getattr(settings, name) for name in names}
    )
    for _ in range(3):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        muon.step()
        expected.step()
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))


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
    torch.testing.assert_close(stack, other, rtol=0, atol=1e-12 if dtype == torch.float64 else 0)


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


REST = (
    "embed_tokens.weight",
    "lm_head.weight",
    "norm.weight",
    "bias",
    "sinks",
    "gate.weight",
    "router.weight",
    "alpha_p",
    "alpha_n",
    "A_log",
    "dt_bias",
    "conv1d.weight",
    "norm1.weight",
    "norm2.weight",
)


@pytest.mark.parametrize("family", SIZES)
def test_muon_trains_matrices_of_layers_and_adamw_what_is_left(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family, num_layers=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    states = OPTIMIZERS["muon"].state_names(model)
    by_muon = {name for name, state in states.items() if state.moments == ("momentum_buffer",)}
    assert states.keys() == {name for name, _ in model.named_parameters()}
    assert any("self_attn" in name for name in by_muon)
    for name in states:
        assert (name in by_muon) != name.endswith((*REST, "layernorm.weight")), name


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_layers_of_an_encoder_are_matrices_and_its_embeddings_are_not(tmp_path: Path, family: str) -> None:
    save_tiny_multimodal_model(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    chosen = trained_by(OPTIMIZERS["muon"].build(model, OptimizerConfig(name="muon"), no_groups), model)
    expected = trained_by(OPTIMIZERS["muon"].reference(model, OptimizerConfig(name="muon")), model)
    assert chosen == expected
    assert any(kind == "Muon" and "vis" in name for name, kind in chosen.items())
    assert {kind for name, kind in chosen.items() if "embed" in name} == {"AdamW"}


def trained_by(optimizers: list[torch.optim.Optimizer], model: nn.Module) -> dict[str, str]:
    """By name of a parameter AdamW or Muon."""
    kinds = {
        parameter.data_ptr(): "AdamW" if isinstance(optimizer, torch.optim.AdamW) else "Muon"
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: kinds[parameter.data_ptr()] for name, parameter in model.named_parameters()}
