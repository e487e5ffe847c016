"""Nodes of a cluster: the order of their GPUs, how ranks are shared out, and what stays on the driver's machine."""

import time
from typing import Any

import pytest

from automodel_rl.config import RayConfig
from automodel_rl.errors import InputError
from automodel_rl.ray import cluster


def test_gpus_are_in_the_order_of_their_numbers() -> None:
    assert sorted(["10", "2", "0", "1", "11"], key=cluster.device_order) == ["0", "1", "2", "10", "11"]
    assert sorted(["MIG-b", "3", "MIG-a"], key=cluster.device_order) == ["MIG-a", "MIG-b", "3"]


def test_nodes_get_the_drivers_variables_but_not_those_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"HF_TOKEN": "secret", "NCCL_DEBUG": "INFO", "PATH": "/bin", "MY_RAY_FLAG": "1"}
    theirs = {"CUDA_VISIBLE_DEVICES": "3", "SLURM_NODEID": "0", "RAY_ADDRESS": "here", "TMPDIR": "/scratch/1"}
    monkeypatch.setattr("os.environ", ours | theirs)
    assert cluster.environment_for_nodes() == ours


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "ranks_per_node", "expected"),
    [
        ([{"CPU": 8}, {"CPU": 8}], 4, None, (4, {"CPU": 4.0})),
        ([{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 2}], 4, None, (2, {"CPU": 2.0, "GPU": 2.0})),
        ([{"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 3}], 6, None, (3, {"CPU": 3.0, "GPU": 3.0})),
        ([{"CPU": 8, "GPU": 3}] * 3, 6, 2, (2, {"CPU": 2.0, "GPU": 2.0})),
        ([{"CPU": 64}, {"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 2}], 4, None, (4, {"CPU": 4.0, "GPU": 4.0})),
        ([{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4, "is_dead": 1}], 8, None, None),
        ([{"CPU": 8, "GPU": 4}], 8, None, None),
    ],
    ids=str,
)
def test_a_node_has_as_many_ranks_as_it_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[dict[str, int]],
    num_ranks: int,
    ranks_per_node: int | None,
    expected: Any,
) -> None:
    told = [{"Alive": "is_dead" not in node, "Resources": node} for node in nodes]
    monkeypatch.setattr("ray.nodes", lambda: told)
    config, deadline = RayConfig(ranks_per_node=ranks_per_node), time.monotonic() - 1
    if expected is None:
        with pytest.raises(InputError, match="the layout has 8 ranks, but the nodes of the Ray cluster have"):
            cluster._share(config, num_ranks, 0, deadline)
    else:
        assert cluster._share(config, num_ranks, 0, deadline) == expected
