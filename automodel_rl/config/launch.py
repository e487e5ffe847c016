"""What starts the ranks of a run."""

from typing import Annotated

from pydantic import Field, field_validator

from automodel_rl.config.base import PathText, Positive, Section


class RayConfig(Section):
    """A Ray cluster that places the ranks on its nodes."""

    address: str = "auto"
    """The cluster: auto for that of this machine, HOST:PORT of its head, or local to start one on this machine for the
    run alone."""

    ranks_per_node: Positive | None = None
    """Number of ranks on each node. null takes the largest that enough nodes have GPUs for, or processors if the
    cluster has no GPUs."""

    restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a row a job that fails is started again from its newest checkpoint. A new checkpoint sets the count
    back to 0, as a job of a service does, which goes on from saved weights. verify is not started again."""

    wait_minutes: Annotated[float, Field(ge=0)] = 30.0
    """Longest wait for free nodes, at the start and before a restart."""

    generators: Annotated[int, Field(ge=0)] = 0
    """Number of generators that the cluster starts to join a run with rollout.generator.kind=joined, on nodes that have
    room besides the ranks: each has a GPU, or a processor if the cluster has no GPUs. One whose node is gone is started
    again elsewhere."""

    generator_python: PathText | None = None
    """Python interpreter of an environment with vLLM on their nodes, with which they write; null writes with
    transformers."""

    @field_validator("address")
    @classmethod
    def _not_a_client(cls, address: str) -> str:
        if "://" in address:
            raise ValueError(
                f"{address!r} is the address of a Ray client, which cannot place ranks: run on a machine of the "
                "cluster, with auto or HOST:PORT"
            )
        return address


class LaunchConfig(Section):
    ray: RayConfig | None = None
    """A Ray cluster on which runs and services start their ranks, and verify with --launcher ray. null: ranks are
    processes of this machine. Processes that are ranks already, such as torchrun's, take no notice of it."""
