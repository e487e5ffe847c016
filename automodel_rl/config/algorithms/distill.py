"""The whole config of a run that distils teachers into a student, on completions that exist."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.data import BatchConfig, DataConfig
from automodel_rl.config.distillation import DistillLossConfig
from automodel_rl.config.further_models import FurtherModel, TeacherConfig, check_can_compare, local
from automodel_rl.config.run import Records, RunConfig, refuse_idle_data_ranks


class DistillConfig(RunConfig):
    """A run of distillation. `automodel-rl distill --help` lists every key.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "chats.jsonl"}]}}
        >>> values |= {"batch": {"sequences": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> DistillConfig(output="runs/mine", teachers={"large": {"path": "Qwen/Qwen3-8B"}}, **values).loss.top_k
        64
    """

    algorithm: Literal["distill"] = "distill"
    """Distillation of teachers into a student, on chats."""

    data: DataConfig
    batch: BatchConfig
    teachers: Annotated[dict[str, TeacherConfig], Field(min_length=1)]
    """The models that the student learns from, by names of your choice. Each teaches the sources that it names."""

    loss: DistillLossConfig = DistillLossConfig()

    @property
    def reads(self) -> Records:
        """What a record of the data holds: a chat, or a text."""
        return "chats"

    @property
    def trained_turns(self) -> Literal["all", "last"]:
        """The assistant's turns of a chat that are trained."""
        return self.data.train_on

    @property
    def further_models(self) -> dict[str, FurtherModel]:
        """The teachers on the run's ranks by name."""
        return local(self.teachers, self.model)

    @property
    def sequences_per_step(self) -> int:
        """Token sequences of one optimizer step, over all data ranks."""
        return self.batch.sequences

    @model_validator(mode="after")
    def _teachers_can_tell(self) -> "DistillConfig":
        check_can_compare(self.teachers, self.loss, self.loss.temperature)
        return self

    @model_validator(mode="after")
    def _microbatches_for_every_data_rank(self) -> "DistillConfig":
        refuse_idle_data_ranks("batch.sequences", self.batch.sequences, self.parallel)
        return self
