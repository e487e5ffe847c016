"""The whole config of a preference-training run."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.base import Positive, Section
from automodel_rl.config.data import DataConfig
from automodel_rl.config.losses import DPOLossConfig
from automodel_rl.config.run import RunConfig


class PairBatchConfig(Section):
    pairs: Positive
    """Pairs of one step over all data ranks (the global batch)."""

    row_tokens: Positive
    """Capacity of a packed row, the microbatch. Both completions of a pair, each with its prompt, share a row."""


class DPOConfig(RunConfig):
    algorithm: Literal["dpo"] = "dpo"
    """Preference training on pairs of a chosen and a rejected completion."""

    data: DataConfig
    batch: PairBatchConfig
    loss: DPOLossConfig = DPOLossConfig()

    precompute_reference: bool = False
    """Compute the reference's log-probabilities of all pairs before the first step, and keep these in place of its
    weights: no forward of the reference in a step, but a pass over the data at the start."""

    @property
    def sequences_per_step(self) -> int:
        return 2 * self.batch.pairs

    @model_validator(mode="after")
    def _rows_for_every_data_rank(self) -> "DPOConfig":
        ranks = self.parallel.num_data_ranks
        if self.batch.pairs < ranks:
            raise ValueError(
                f"batch.pairs={self.batch.pairs} must be at least the {ranks} data ranks "
                "(parallel.dp_shard x parallel.dp_replicate), or some would never see data: raise it"
            )
        return self
