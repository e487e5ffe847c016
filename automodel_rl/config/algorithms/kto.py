"""The whole config of a preference-training run on single completions."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.data import BatchConfig, JudgedDataConfig
from automodel_rl.config.losses import KTOLossConfig
from automodel_rl.config.run import Records, RunConfig, refuse_idle_data_ranks


class KTOConfig(RunConfig):
    """A run of preference training on single completions. `automodel-rl kto --help` lists every key.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "judged.jsonl"}]}}
        >>> values |= {"batch": {"sequences": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> KTOConfig(output="runs/mine", **values).loss.beta
        0.1
    """

    algorithm: Literal["kto"] = "kto"
    """Preference training on completions that are each called good or bad (Ethayarajh et al., arXiv:2402.01306)."""

    data: JudgedDataConfig
    batch: BatchConfig
    loss: KTOLossConfig = KTOLossConfig()

    @property
    def reads(self) -> Records:
        """What a record of the data holds: a completion of a prompt, and whether it is good."""
        return "judged"

    @property
    def trained_turns(self) -> Literal["all", "last"]:
        """The assistant's turns of a chat that are judged."""
        return self.data.train_on

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is kept: it is."""
        return True

    @property
    def sequences_per_step(self) -> int:
        """Token sequences of one optimizer step, over all data ranks."""
        return self.batch.sequences

    @model_validator(mode="after")
    def _sizes(self) -> "KTOConfig":
        refuse_idle_data_ranks("batch.sequences", self.batch.sequences, self.parallel)
        if self.loss.reference_point == "batch" and self.batch.sequences < 2:
            raise ValueError(
                "batch.sequences=1: the reference point comes from completions of other prompts: use at least 2, or "
                "loss.reference_point=zero"
            )
        return self
