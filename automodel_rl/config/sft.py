"""The whole config of a supervised fine-tuning run."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.data import BatchConfig, DataConfig
from automodel_rl.config.run import RunConfig


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
        ranks = self.parallel.num_data_ranks
        if self.batch.sequences < ranks:
            raise ValueError(
                f"batch.sequences={self.batch.sequences} must be at least the {ranks} data ranks "
                "(parallel.dp_shard x parallel.dp_replicate), or some would never see data: raise it"
            )
        return self
