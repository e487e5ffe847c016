"""The whole config of a supervised fine-tuning run."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.data import BatchConfig, DataConfig
from automodel_rl.config.losses import SFTLossConfig
from automodel_rl.config.run import Records, RunConfig, refuse_idle_data_ranks


class SFTConfig(RunConfig):
    """A run of supervised fine-tuning. `automodel-rl sft --help` lists every key.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "chats.jsonl"}]}}
        >>> values |= {"batch": {"sequences": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> SFTConfig(output="runs/mine", **values).optimizer.lr
        1e-05
    """

    algorithm: Literal["sft"] = "sft"
    """Supervised fine-tuning on chats."""

    data: DataConfig
    batch: BatchConfig
    loss: SFTLossConfig = SFTLossConfig()

    @property
    def reads(self) -> Records:
        """What a record of the data holds: a chat, or a text."""
        return "chats"

    @property
    def trained_turns(self) -> Literal["all", "last"]:
        """The assistant's turns of a chat that are trained."""
        return self.data.train_on

    @property
    def compares_logprobs(self) -> bool:
        """Whether log-probabilities of several passes are compared: they are not."""
        return False

    @property
    def has_likelihood_loss(self) -> bool:
        """Whether the loss is the mean negative log-likelihood of the trained tokens."""
        return self.loss_function is None and self.loss.kind == "likelihood"

    @property
    def sequences_per_step(self) -> int:
        """Token sequences of one optimizer step, over all data ranks."""
        return self.batch.sequences

    @model_validator(mode="after")
    def _microbatches_for_every_data_rank(self) -> "SFTConfig":
        refuse_idle_data_ranks("batch.sequences", self.batch.sequences, self.parallel)
        return self
