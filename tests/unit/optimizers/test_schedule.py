"""The learning rate of every step."""

import math

import pytest

from automodel_rl.config import OptimizerConfig
from automodel_rl.errors import InputError
from automodel_rl.optimizers import learning_rate


def rates(decay: str, steps: int = 10) -> list[float]:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, decay=decay, min_lr_ratio=0.1)
    return [learning_rate(config, step, 10) for step in range(steps)]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates("constant") == [0.25, 0.5, 0.75] + [1.0] * 7


def test_a_linear_decay_ends_at_its_floor() -> None:
    assert rates("linear")[4:] == pytest.approx([1 - 0.9 * i / 6 for i in range(6)])


def test_cosine_decay_ends_at_the_floor() -> None:
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 6)) / 2 for i in range(7)]
    assert rates("cosine", 11)[4:] == pytest.approx(expected)


def test_decay_without_a_length_is_refused() -> None:
    with pytest.raises(InputError, match="needs the number of steps"):
        learning_rate(OptimizerConfig(), 0, None)


def test_a_warm_up_may_be_a_share_of_all_steps() -> None:
    config = OptimizerConfig(lr=1.0, warmup_ratio=0.35, decay="constant")
    assert [learning_rate(config, step, 10) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    with pytest.raises(InputError, match="optimizer.warmup_ratio=0.35 needs the number of steps"):
        learning_rate(config, 0, None)
    with pytest.raises(ValueError, match="at most one of warmup_steps and warmup_ratio"):
        OptimizerConfig(warmup_steps=1, warmup_ratio=0.1)
