"""Layouts that `plan` looks at are ones that the table takes."""

from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.tools.plan.alternatives import _candidates


def test_layouts_without_cp_exchange_no_heads() -> None:
    asked = ParallelConfig(cp=2, dp_shard=4, cp_exchange="all_to_all")
    exchanges = {(found.cp > 1, found.cp_exchange) for found, _ in _candidates(asked, MemoryConfig(), 8, 0)}
    assert exchanges == {(False, "all_gather"), (True, "all_to_all")}


def test_experts_of_a_mixture_are_spread_though_the_config_has_them_whole() -> None:
    asked = ParallelConfig(dp_shard=8)
    assert {found.ep for found, _ in _candidates(asked, MemoryConfig(), 8, 4)} == {1, 2, 4}
    assert {found.ep for found, _ in _candidates(asked, MemoryConfig(), 8, 0)} == {1}
