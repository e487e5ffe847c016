"""A policy on a Ray cluster, trained by a program that needs no GPU itself."""

import contextlib
from typing import Any

import ray

from automodel_rl.config import RayConfig, RunConfig
from automodel_rl.errors import InputError
from automodel_rl.generators.fleet import Fleet
from automodel_rl.policy.policy import Policy
from automodel_rl.ray.actor_crew import ActorCrew
from automodel_rl.ray.cluster import Nodes, connected, device_order, environment_for_nodes, reserved
from automodel_rl.ray.policy_actor import PolicyActor, RankFacts, RankLocation

KEEP_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Makes all GPUs of a node visible to its actors, so that all ranks number them alike."""


class PolicyGroup(Policy):
    """A model in training on a Ray cluster, one actor per rank: a `Policy` and a context manager.

    Trained weights stay on the ranks. The cluster is that of `launch.ray`; without it, this machine's.

    Args:
        config: a run's config, of which `model`, `parallel`, `memory`, `optimizer`, `batch` and `launch` are used;
            for grpo also `rollout` and `weight_sync`, for generators beside the ranks.
        total_steps: number of optimizer steps; required if the learning rate decays.

    Attributes:
        fleet: the generators, which start with policy version 1.

    Raises:
        InputError: the config does not fit the model or the cluster.
        PolicyLostError: a rank failed or is gone, which ends the group. Every method may raise it.
    """

    def __init__(self, config: RunConfig, total_steps: int | None = None):
        settings = config.launch.ray or RayConfig()
        if config.batch.microbatch_tokens == "auto":
            raise InputError("batch.microbatch_tokens=auto: not supported with a PolicyGroup: set a number")
        self.config = config
        held = contextlib.ExitStack()
        try:
            if not ray.is_initialized():
                held.enter_context(connected(settings.address))
            if config.generation is not None and config.generation.rollout.generator.devices:
                raise InputError(
                    "rollout.generator.place: devices are not supported with a PolicyGroup: use shared or servers"
                )
            crew = _started(held.enter_context(reserved(settings, config.world_size)), held)
            facts: list[RankFacts] = crew.call_actors("open", [config] * config.world_size)
            crew.data_ranks = [of_rank.data_rank for of_rank in facts]
            super().__init__(crew, facts[0].packing, facts[0].vocab_size)
            self.begin(config.optimizer, total_steps)
            self._fleet = Fleet(crew)
            if config.generation is not None:
                self._fleet.start(config.generation.generator_spec)
                self._fleet.sync()
        except BaseException:
            held.close()
            raise
        self._actors = crew

    @property
    def fleet(self) -> Fleet:
        """The generators. Raises InputError if the config has none."""
        if self.config.generation is None:
            raise InputError(f"a {type(self.config).__name__} has no generators: use a GRPOConfig")
        return self._fleet

    def close(self) -> None:
        """Ends the ranks and releases their nodes, without waiting long for a call in progress."""
        self._actors.close(has_fleet=self.config.generation is not None)

    def __enter__(self) -> "PolicyGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _started(nodes: Nodes, held: contextlib.ExitStack) -> ActorCrew:
    per_node = nodes.ranks_per_node
    kind = ray.remote(PolicyActor)
    environment = {"env_vars": KEEP_DEVICES}
    actors: list[Any] = [
        kind.options(**nodes.options(node, per_node), runtime_env=environment).remote()
        for node in range(nodes.count)
        for _ in range(per_node)
    ]
    places: list[RankLocation] = ActorCrew(actors, held).call_actors("location")
    # Ray assigns GPUs in any order; adjacent ranks should use adjacent GPUs.
    order = sorted(range(len(actors)), key=lambda place: (place // per_node, device_order(places[place].device or "0")))
    actors, places = [actors[place] for place in order], [places[place] for place in order]
    rendezvous = {
        "WORLD_SIZE": str(len(actors)),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(places[0].port),
    }
    joined = []
    for rank, actor in enumerate(actors):
        of_node = places[rank // per_node * per_node :][:per_node]
        devices = ",".join(place.device for place in of_node if place.device is not None)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node)}
        own |= {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
        joined.append(actor.join.remote(environment_for_nodes(), rendezvous | own))
    ray.get(joined)
    return ActorCrew(actors, held)
