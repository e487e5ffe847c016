"""The whole config of a supervised fine-tuning run."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.data import BatchConfig, DataConfig
from automodel_rl.config.run import RunConfig, refuse_idle_data_ranks


class SFTConfig(RunConfig):
    algorithm: Literal["sft"] = "sft"
    """Supervised fine-tuning on chats."""

    data: DataConfig
    batch: BatchConfig

    @property
    def sequences_per_step(self) -> int:
        return self.batch.sequences

    @model_validator(mode="after")
    def _rows_for_every_data_rank(self) -> "SFTConfig":
        refuse_idle_data_ranks("batch.sequences", self.batch.sequences, self.parallel)
        return self
