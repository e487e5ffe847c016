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
"""The name of a rank's `ServiceRank`, for remote calls."""


class ServiceRank:
    """This rank of the service. Its methods are collectives.

    Args:
        handle: the model.
        tokenizer: its tokenizer.
        teachers: further base models by name.

    Attributes:
        teachers: those of the arguments.
        targets: the objects that have methods to call, by name.
        runs: the runs; there from `open_runs` on.
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
        """Prepares for runs. The engine must be there."""
        self.runs = self.targets[RUNS] = Runs(self.policy.engine)

    def show(self, kept: str | None, folder: str | None, shape: RunShape | None) -> None:
        """Gives the model weights to compute with, as `Runs.show`, and adapters of generators their scale."""
        self.runs.show(kept, folder, shape)
        self._scale.set(self.runs.trained.scale)


class AdapterScale:
    """Tells this rank's generator the factor of the output of the adapters that come next. It is told again to a
    generator that is started again."""

    def __init__(self) -> None:
        self.scale = 1.0
        self._told: tuple[RankGenerator, Transport] | None = None

    def prepare(self, generator: RankGenerator, transport: Transport) -> None:
        """Tells it to a generator that has been started."""
        self._told = generator, transport
        self.set(self.scale)

    def set(self, scale: float) -> None:
        """Tells the generator another factor."""
        self.scale = scale
        if self._told is None:
            return
        generator, transport = self._told
        if isinstance(generator, TransformersGenerator):
            set_scale([generator.model], scale)
        elif isinstance(transport, VllmAdapters):
            # vLLM has places of the largest rank, and computes the factor from what a folder of adapters says.
            lora = transport.origin.config
            own = lora.model_copy(update={"alpha": scale * lora.rank, "rslora": False})
            transport.origin = dataclasses.replace(transport.origin, config=own)
