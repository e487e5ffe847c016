"""How the ranks of a run are started."""

from typing import Annotated

from pydantic import Field, field_validator

from automodel_rl.config.base import PathText, Positive, Section


class RayConfig(Section):
    """A Ray cluster that runs the ranks on its nodes."""

    address: str = "auto"
    """The cluster: auto for the one of this machine, HOST:PORT of its head node, or local to start one on this machine
    for this run only."""

    ranks_per_node: Positive | None = None
    """Number of ranks on each node. null: the largest for which enough nodes have GPUs, or processors in a cluster
    without GPUs."""

    restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum number of consecutive restarts of a failed job from its newest checkpoint. A new checkpoint resets the
    count, as does a completed job of a service, which resumes from saved weights. verify is never restarted."""

    wait_minutes: Annotated[float, Field(ge=0)] = 30.0
    """Maximum wait for free nodes in minutes, at the start and before each restart."""

    generators: Annotated[int, Field(ge=0)] = 0
    """Number of generators that the cluster starts for rollout.generator.kind=joined, on nodes with room besides the
    ranks. Each takes a GPU, or a processor in a cluster without GPUs. Generators of lost nodes are restarted
    elsewhere."""

    generator_python: PathText | None = None
    """Python interpreter on these generators' nodes of an environment with vLLM, with which they then generate; null:
    they generate with transformers."""

    @field_validator("address")
    @classmethod
    def _not_a_client(cls, address: str) -> str:
        if "://" in address:
            raise ValueError(
                f"{address!r} is a Ray client address, which cannot place ranks: run on a machine of the cluster, with "
                "auto or HOST:PORT"
            )
        return address


class LaunchConfig(Section):
    ray: RayConfig | None = None
    """Ray cluster for the ranks of runs and services, and of verify with --launcher ray. null: the ranks are processes
    on this machine. Ignored by processes that are already ranks, such as those of torchrun."""
