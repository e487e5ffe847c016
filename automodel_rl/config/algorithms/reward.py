"""The whole config of a run that trains a reward model."""

from typing import Any, Literal

from pydantic import model_validator

from automodel_rl.config.data import PairBatchConfig, RankedDataConfig
from automodel_rl.config.losses import RewardLossConfig
from automodel_rl.config.run import Records, RunConfig, refuse_idle_data_ranks


class RewardModelConfig(RunConfig):
    """A run that trains a reward model. `automodel-rl reward --help` lists every key.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "pairs.jsonl"}]}}
        >>> values |= {"batch": {"pairs": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> RewardModelConfig(output="runs/mine", **values).model.num_labels
        1
    """

    algorithm: Literal["reward"] = "reward"
    """A reward model from pairs of a chosen and a rejected completion (Bradley-Terry)."""

    data: RankedDataConfig
    batch: PairBatchConfig
    loss: RewardLossConfig = RewardLossConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_score(cls, values: Any) -> Any:
        """The model gets a linear head with one output."""
        model = values.get("model") if isinstance(values, dict) else None
        if not isinstance(model, dict):
            return values
        given = model.get("num_labels")
        if given not in (None, 1):
            raise ValueError(f"model.num_labels={given}: a reward model gives one score: leave it out")
        return {**values, "model": {**model, "num_labels": 1}}

    @property
    def reads(self) -> Records:
        """What a record of the data holds: two completions of a prompt, and perhaps how much better the first is."""
        return "ranked pairs"

    @property
    def trains_linear_head(self) -> bool:
        """Whether the model has a linear head in place of the vocabulary's: it does."""
        return True

    @property
    def compares_logprobs(self) -> bool:
        """Whether log-probabilities of several passes are compared: they are not."""
        return False

    @property
    def sequences_per_step(self) -> int:
        """Token sequences of one optimizer step, over all data ranks."""
        return 2 * self.batch.pairs

    @model_validator(mode="after")
    def _microbatches_for_every_data_rank(self) -> "RewardModelConfig":
        refuse_idle_data_ranks("batch.pairs", self.batch.pairs, self.parallel)
        return self
