"""Driver side of a Ray cluster: the connection and reserved nodes."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from automodel_rl.config import RayConfig
from automodel_rl.errors import InputError

NOT_FOR_NODES = ("RAY_", "SLURM_", "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "PWD", "OLDPWD", "TMPDIR")
"""Prefixes of environment variables specific to the driver's machine."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects to the cluster for the block. Raises InputError if no cluster answers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"launch.ray.address={address}: no Ray cluster answers ({reason}): start one with `ray start --head`, set "
            "the address of its head, or use local"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Nodes:
    """Nodes reserved for ranks.

    Attributes:
        group: placement group with one bundle per node.
        bundle: resources of each bundle.
        count: number of nodes.
    """

    group: PlacementGroup
    bundle: dict[str, float]
    ranks_per_node: int
    count: int

    def options(self, node: int, share: int = 1) -> dict[str, Any]:
        """Returns options of an actor that takes 1 / `share` of a node's reserved resources."""
        return {
            "num_cpus": self.bundle["CPU"] / share,
            "num_gpus": self.bundle.get("GPU", 0) / share,
            "max_restarts": 0,  # a rank restarted alone finds no peers
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=node),
        }


@contextlib.contextmanager
def reserved(config: RayConfig, num_ranks: int, devices: Sequence[int] = ()) -> Iterator[Nodes]:
    """Reserves nodes on distinct machines for the block. At its end all actors on them are killed.

    Args:
        config: the config's `launch.ray`.
        devices: GPUs of each node that are reserved for generators, numbered after those of the ranks.

    Raises:
        InputError: the cluster has too few free nodes, even after the wait.
    """
    if config.ranks_per_node is not None and num_ranks % config.ranks_per_node:
        raise InputError(
            f"launch.ray.ranks_per_node={config.ranks_per_node}: does not divide the {num_ranks} ranks of the layout: "
            "choose a divisor"
        )
    deadline = time.monotonic() + config.wait_minutes * 60
    per_node, bundle = _share(config, num_ranks, len(devices), deadline)
    expected = [*range(per_node, per_node + len(devices))]
    if [*devices] != expected:
        raise InputError(
            f"rollout.generator.place={[*devices]}: on a node of the Ray cluster, the {per_node} ranks use the first "
            f"GPUs and generators those after them: set {expected}"
        )
    count = num_ranks // per_node
    group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
    try:
        _wait(group, deadline, f"{count} nodes with {_text(bundle)} each")
        yield Nodes(group, bundle, per_node, count)
    finally:
        remove_placement_group(group)


def _share(config: RayConfig, num_ranks: int, own_devices: int, deadline: float) -> tuple[int, dict[str, float]]:
    """Returns the number of ranks per node and their resources. Waits until the cluster is large enough for the job."""
    has_told = False
    while True:
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has_gpus = any("GPU" in one for one in resources)
        for per_node in [config.ranks_per_node] if config.ranks_per_node else range(num_ranks, 0, -1):
            gpus = {"GPU": float(per_node + own_devices)} if has_gpus else {}
            bundle = {"CPU": float(per_node), **gpus}
            fitting = [one for one in resources if all(one.get(key, 0) >= n for key, n in bundle.items())]
            if num_ranks % per_node == 0 and len(fitting) >= num_ranks // per_node:
                return per_node, bundle
        has = f"the layout has {num_ranks} ranks, but the nodes of the Ray cluster have {_text(_sum(resources))}"
        if time.monotonic() > deadline:
            raise InputError(f"{has}, even after launch.ray.wait_minutes: use a smaller layout, or add nodes")
        if not has_told:
            print(f"{has}: waiting for more nodes, {_minutes(deadline)} ...", flush=True)
            has_told = True
        time.sleep(1)


def _sum(resources: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: sum(one.get(key, 0) for one in resources) for key in ("CPU", "GPU")}


def _text(resources: dict[str, float]) -> str:
    names = {"CPU": "processors", "GPU": "GPUs"}
    return " and ".join(f"{resources[key]:.0f} {name}" for key, name in names.items() if resources.get(key))


def _minutes(deadline: float) -> str:
    return f"up to {max(0.0, deadline - time.monotonic()) / 60:.0f} minutes"


SAY_SECONDS = 10.0
"""Seconds after which a wait for free nodes is reported."""


def _wait(group: PlacementGroup, deadline: float, wish: str) -> None:
    if group.wait(SAY_SECONDS):
        return
    print(f"waiting for {wish}, {_minutes(deadline)} ...", flush=True)
    while time.monotonic() < deadline:
        if group.wait(1):
            return
    free = _text(_sum([ray.available_resources()])) or "nothing"
    raise InputError(
        f"the Ray cluster does not have {wish} free, even after launch.ray.wait_minutes (free: {free}): end other "
        "jobs, add nodes, or use a smaller layout"
    )


def device_order(name: str) -> tuple[int, str]:
    """Sort key of a GPU on its machine, by its number or other name."""
    return (int(name), "") if name.isdecimal() else (0, name)


def environment_for_nodes() -> dict[str, str]:
    """Returns this process's variables that ranks on other machines receive unless their nodes define them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_NODES)}
