"""Layouts that `plan` looks at are ones that the table takes."""

from automodel_rl.config import ParallelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.tools.plan.alternatives import _candidates


def test_layouts_without_cp_exchange_no_heads() -> None:
    asked = ParallelConfig(cp=2, dp_shard=4, cp_exchange="all_to_all")
    exchanges = {(found.cp > 1, found.cp_exchange) for found, _ in _candidates(asked, MemoryConfig(), 8)}
    assert exchanges == {(False, "all_gather"), (True, "all_to_all")}
