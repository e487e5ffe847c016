"""Memory of the additional models, while the trained model computes and while they do."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from automodel_rl.config import RunConfig
from automodel_rl.config.further_models import FurtherModel
from automodel_rl.config.model import MemoryConfig
from automodel_rl.config.optimizer import OptimizerConfig
from automodel_rl.config.parallel import ParallelConfig
from automodel_rl.estimate.memory import MemoryModel, RankMemory

ANY_TOKENS = 1024
"""Arbitrary microbatch capacity, for memory that does not depend on it."""


@dataclass(frozen=True)
class FurtherModelsMemory:
    """The additional models of a run.

    Attributes:
        requested: the models by name.
        wholes: their Hugging Face configs by name.
    """

    requested: Mapping[str, FurtherModel] = field(default_factory=dict)
    wholes: Mapping[str, PretrainedConfig] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, wholes: Mapping[str, PretrainedConfig]) -> "FurtherModelsMemory":
        """Returns the additional models of a run."""
        return cls(config.further_models, wholes)

    def resident_bytes(self, parallel: ParallelConfig, memory: MemoryConfig) -> int:
        """Bytes on a rank while the trained model computes: weights, and moments of trained models. Models in host
        memory take none."""
        return sum(
            _kept(self._model(name, ANY_TOKENS), one, parallel, memory)
            for name, one in self.requested.items()
            if one.between == "device"
        )

    def peak_bytes(self, parallel: ParallelConfig, memory: MemoryConfig, num_tokens: int, trained: RankMemory) -> int:
        """Peak bytes on a rank while one of them computes, in addition to `resident_bytes`; 0 without any.

        Args:
            parallel, memory: the run's sections.
            num_tokens: microbatch capacity.
            trained: memory of the trained model, whose weights and moments stay on the device, except when a trained
                additional model takes turns with it.
        """
        found, resident = 0, trained.weights + trained.moments
        for name, one in self.requested.items():
            model, is_on_host = self._model(name, num_tokens), one.between == "host"
            kept = _kept(model, one, parallel, memory)
            if one.is_trained:
                step = model.plan(parallel, memory, 2 * parallel.pp).peak
                found = max(found, step if is_on_host else resident + step - kept)
            else:
                found = max(found, resident + (kept if is_on_host else 0))
        return found

    def _model(self, name: str, num_tokens: int) -> MemoryModel:
        return MemoryModel(self.wholes[name], self.requested[name].model, num_tokens, OptimizerConfig())


def _kept(model: MemoryModel, requested: FurtherModel, parallel: ParallelConfig, memory: MemoryConfig) -> int:
    """Bytes that a model keeps on a rank between forwards."""
    rank = max(model.plan(parallel, memory, parallel.pp).ranks, key=lambda one: one.weights)
    if requested.is_trained:
        return rank.weights + rank.moments
    return rank.weights * model.compute // model.master
