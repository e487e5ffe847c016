"""The whole config of a supervised fine-tuning run."""

from typing import Annotated

from pydantic import Field, model_validator

from automodel_rl.config.base import Positive, Section
from automodel_rl.config.checkpoint import CheckpointConfig
from automodel_rl.config.data import BatchConfig, DataConfig
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.config.model import ModelConfig
from automodel_rl.config.observe import ObserveConfig
from automodel_rl.config.optimizer import OptimizerConfig
from automodel_rl.config.parallel import ParallelConfig


class LengthConfig(Section):
    """How long a run is: give `steps` or `epochs`, not both."""

    steps: Positive | None = None
    """Optimizer steps."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training data; the last step may have fewer sequences."""

    validate_every: Positive | None = None
    """Steps between validations; null validates only at the end."""

    @model_validator(mode="after")
    def _one_limit(self) -> "LengthConfig":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self


class SFTConfig(Section):
    output: str
    """Run directory: config.yaml, metrics.jsonl, report.html, checkpoints/, final/."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the data order and of dropout."""

    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    length: LengthConfig
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _rows_for_every_data_rank(self) -> "SFTConfig":
        ranks = self.parallel.num_data_ranks
        if self.batch.sequences < ranks:
            raise ValueError(
                f"batch.sequences={self.batch.sequences} must be at least the {ranks} data ranks "
                "(parallel.dp_shard x parallel.dp_replicate), or some would never see data: raise it"
            )
        return self
