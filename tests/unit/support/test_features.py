"""What counts as asked for."""

from types import SimpleNamespace
from typing import Any

import pytest

from automodel_rl.support import features


@pytest.mark.parametrize(
    ("is_moe", "num_experts", "found"), [(True, 8, "a 'gemma4' model"), (True, 0, ""), (False, 0, "")]
)
def test_a_dense_model_of_a_family_of_mixtures_is_none(is_moe: bool, num_experts: int, found: str) -> None:
    asked: Any = SimpleNamespace(
        family=SimpleNamespace(is_moe=is_moe), description=SimpleNamespace(family="gemma4", num_experts=num_experts)
    )
    assert features._with_experts(asked) == found
