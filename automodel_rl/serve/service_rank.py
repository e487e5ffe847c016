"""A rank of the service: the objects whose methods rank 0 calls on all ranks."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.generators.fleet_rank import FleetRank
from automodel_rl.generators.protocol import RankGenerator
from automodel_rl.generators.transformers_generator import TransformersGenerator
from automodel_rl.lora.rank import set_scale
from automodel_rl.model.handle import ModelHandle
from automodel_rl.policy.crew import FLEET, POLICY, further_model
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.serve.messages import RunShape
from automodel_rl.serve.runs import RUNS, Runs
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.vllm_adapters import VllmAdapters

SERVICE = "service"
"""Name of a rank's `ServiceRank` for remote calls."""


class ServiceRank:
    """This rank of the service. Its methods are collectives.

    Args:
        teachers: further base models by name.

    Attributes:
        targets: objects for remote calls, by name.
        runs: set by `open_runs`.
    """

    def __init__(
        self,
        handle: ModelHandle,
        tokenizer: PreTrainedTokenizerBase,
        teachers: Mapping[str, ModelHandle] = MappingProxyType({}),
    ):
        self.policy, self.teachers = PolicyRank(handle, tokenizer), teachers
        self._scale = AdapterScale()
        self.runs: Runs
        self.targets: dict[str, Any] = {
            POLICY: self.policy,
            FLEET: FleetRank(self.policy, tokenizer, self._scale.prepare),
            SERVICE: self,
            **{further_model(name): PolicyRank(teacher, tokenizer) for name, teacher in teachers.items()},
        }

    def open_runs(self) -> None:
        """Creates the runs. Requires the engine."""
        self.runs = self.targets[RUNS] = Runs(self.policy.engine)

    def show(self, kept: str | None, folder: str | None, shape: RunShape | None) -> None:
        """Loads weights as `Runs.show` does, and sets the adapter scale of the generator."""
        self.runs.show(kept, folder, shape)
        self._scale.set(self.runs.trained.scale)


class AdapterScale:
    """Output factor of the adapters that are synced next, applied to this rank's generator, also after it restarts."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._told: tuple[RankGenerator, Transport] | None = None

    def prepare(self, generator: RankGenerator, transport: Transport) -> None:
        """Applies the factor to a generator that has just started."""
        self._told = generator, transport
        self.set(self.scale)

    def set(self, scale: float) -> None:
        """Changes the factor."""
        self.scale = scale
        if self._told is None:
            return
        generator, transport = self._told
        if isinstance(generator, TransformersGenerator):
            set_scale([generator.model], scale)
        elif isinstance(transport, VllmAdapters):
            # vLLM's adapter slots have the largest rank, and it computes the factor from the adapter folder's config.
            lora = transport.origin.config
            own = lora.model_copy(update={"alpha": scale * lora.rank, "rslora": False})
            transport.origin = dataclasses.replace(transport.origin, config=own)
