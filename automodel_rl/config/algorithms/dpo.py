"""The whole config of a preference-training run."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.data import ExamplesConfig, PairBatchConfig
from automodel_rl.config.losses import DPOLossConfig
from automodel_rl.config.run import Records, RunConfig, refuse_idle_data_ranks


class DPOConfig(RunConfig):
    """A run of preference training. `automodel-rl dpo --help` lists every key.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "pairs.jsonl"}]}}
        >>> values |= {"batch": {"pairs": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> DPOConfig(output="runs/mine", **values).loss.variant
        'dpo'
    """

    algorithm: Literal["dpo"] = "dpo"
    """Preference training on pairs of a chosen and a rejected completion."""

    data: ExamplesConfig
    batch: PairBatchConfig
    loss: DPOLossConfig = DPOLossConfig()

    precompute_reference: bool = False
    """Compute the reference's log-probabilities of all pairs before the first step, and keep them in place of its
    weights. Steps then need no forward of the reference, but the run begins with a pass over the data."""

    @property
    def reads(self) -> Records:
        """What a record of the data holds: two completions of a prompt."""
        return "pairs"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is kept."""
        return self.loss.needs_reference

    @property
    def sequences_per_step(self) -> int:
        """Token sequences of one optimizer step, over all data ranks."""
        return 2 * self.batch.pairs

    @model_validator(mode="after")
    def _microbatches_for_every_data_rank(self) -> "DPOConfig":
        refuse_idle_data_ranks("batch.pairs", self.batch.pairs, self.parallel)
        return self
