"""What holds for every optimizer: the state that is described is the state that is kept, and it can be put back."""

import pytest
import torch
from torch import nn

from automodel_rl.config import MuonConfig, OptimizerConfig
from automodel_rl.config.load import check_config
from automodel_rl.config.optimizer import OptimizerName
from automodel_rl.errors import InputError
from automodel_rl.optimizers import OPTIMIZERS, ModelOptimizer
from tests.unit.optimizers.test_adamw import no_groups

KINDS = pytest.mark.parametrize("name", OPTIMIZERS)


def make(name: OptimizerName) -> tuple[nn.Module, ModelOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    config = OptimizerConfig(name=name, lr=0.1, weight_decay=0.1)
    return model, ModelOptimizer([(model, no_groups, config)], OPTIMIZERS, 0.1)


def train(model: nn.Module, optimizer: ModelOptimizer, step: int) -> None:
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(0.1)


@KINDS
def test_the_state_is_what_its_names_and_sizes_say(name: OptimizerName) -> None:
    model, optimizer = make(name)
    before = {parameter: optimizer.state_of(parameter) for parameter in model.parameters()}
    train(model, optimizer, 0)
    for parameter, names in optimizer.state_names.items():
        (kept,) = [o.state[parameter] for o in optimizer.optimizers if parameter in o.state]
        assert set(kept) == set(names.all) == set(before[parameter])
        assert sorted(tensor.nbytes for tensor in kept.values()) == sorted(names.sizes(parameter))
        assert not any(tensor.any() for tensor in before[parameter].values())
    assert sum(1 for _ in optimizer.moments()) == sum(len(names.tensors) for names in optimizer.state_names.values())


@KINDS
def test_training_goes_on_from_a_state_bit_for_bit(name: OptimizerName) -> None:
    model, optimizer = make(name)
    train(model, optimizer, 0)
    other, resumed = make(name)
    other.load_state_dict(model.state_dict())
    for parameter, source in zip(other.parameters(), model.parameters(), strict=True):
        resumed.set_state(parameter, {key: value.clone() for key, value in optimizer.state_of(source).items()})
    train(model, optimizer, 1)
    train(other, resumed, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@KINDS
def test_what_is_frozen_is_not_trained_and_has_no_state(name: OptimizerName) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    config = OptimizerConfig(name=name)
    parts = [(model, no_groups, config), (nn.Sequential(), no_groups, config)]
    optimizer = ModelOptimizer(parts, OPTIMIZERS, config.lr)
    assert set(optimizer.state_names) == set(model[1].parameters())


def test_matrices_follow_the_schedule_at_a_rate_of_their_own() -> None:
    config = OptimizerConfig(name="muon", lr=0.1, muon=MuonConfig(lr=0.4))
    optimizer = ModelOptimizer([(nn.Sequential(nn.Linear(4, 3)), no_groups, config)], OPTIMIZERS, config.lr)
    optimizer.step(0.05)
    assert [group["lr"] for group in optimizer.groups if group["params"]] == [0.2, 0.05]


def test_another_peak_follows_the_schedule_in_proportion() -> None:
    config = OptimizerConfig(name="muon", lr=0.2, muon=MuonConfig(lr=0.8))
    optimizer = ModelOptimizer([(nn.Sequential(nn.Linear(4, 3)), no_groups, config)], OPTIMIZERS, peak=0.1)
    optimizer.step(0.05)
    assert [group["lr"] for group in optimizer.groups if group["params"]] == pytest.approx([0.4, 0.1])


def test_settings_of_another_optimizer_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"muon.momentum=0.5: adamw does not use it: remove it, or set name to"):
        check_config(OptimizerConfig, {"muon": {"momentum": 0.5}})
    assert check_config(OptimizerConfig, OptimizerConfig().model_dump()) == OptimizerConfig()
