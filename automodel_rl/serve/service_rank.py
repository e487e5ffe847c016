"""A rank of the service: the objects whose methods rank 0 calls on all ranks."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.generators.fleet_rank import FleetRank
from automodel_rl.model.handle import ModelHandle
from automodel_rl.policy.crew import FLEET, POLICY, further_model
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.serve.adapter_scale import AdapterScale
from automodel_rl.serve.messages import RunShape
from automodel_rl.serve.runs import RUNS, Runs

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
