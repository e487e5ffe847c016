"""Configs of supervised runs: sft, dpo, kto, reward and distill."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from automodel_rl.config.data import (
    BatchConfig,
    DataConfig,
    ExamplesConfig,
    LabelledDataConfig,
    PairBatchConfig,
    RankedDataConfig,
)
from automodel_rl.config.distillation import DistillLossConfig
from automodel_rl.config.further_models import FurtherModel, TeacherConfig, check_can_compare, local
from automodel_rl.config.losses import DPOLossConfig, KTOLossConfig, RewardLossConfig, SFTLossConfig
from automodel_rl.config.run import Records, RunConfig, refuse_idle_data_ranks


class _SequenceRunConfig(RunConfig):
    """A run whose batches are sequences."""

    data: DataConfig | LabelledDataConfig
    batch: BatchConfig

    @property
    def trained_turns(self) -> Literal["all", "last"]:
        """Assistant turns of a chat that are trained, or that its label applies to."""
        return self.data.train_on

    @property
    def sequences_per_step(self) -> int:
        """Token sequences per optimizer step, over all data ranks."""
        return self.batch.sequences

    @model_validator(mode="after")
    def _microbatches_for_every_data_rank(self) -> Self:
        refuse_idle_data_ranks("batch.sequences", self.batch.sequences, self.parallel)
        return self


class _PairRunConfig(RunConfig):
    """A run whose batches are pairs of completions."""

    data: ExamplesConfig
    batch: PairBatchConfig

    @property
    def sequences_per_step(self) -> int:
        """Token sequences per optimizer step, over all data ranks."""
        return 2 * self.batch.pairs

    @model_validator(mode="after")
    def _microbatches_for_every_data_rank(self) -> Self:
        refuse_idle_data_ranks("batch.pairs", self.batch.pairs, self.parallel)
        return self


class SFTConfig(_SequenceRunConfig):
    """A supervised fine-tuning run. `automodel-rl sft --help` lists all keys.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "chats.jsonl"}]}}
        >>> values |= {"batch": {"sequences": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> SFTConfig(output="runs/mine", **values).optimizer.lr
        1e-05
    """

    algorithm: Literal["sft"] = "sft"
    """Supervised fine-tuning on chats."""

    data: DataConfig
    loss: SFTLossConfig = SFTLossConfig()

    @property
    def record_type(self) -> Records:
        """Type of the data's records: chats or texts."""
        return "chats"

    @property
    def compares_logprobs(self) -> bool:
        """False: there is a single pass."""
        return False

    @property
    def has_likelihood_loss(self) -> bool:
        """Whether the loss is the mean negative log-likelihood of the trained tokens."""
        return self.loss_function is None and self.loss.kind == "likelihood"


class DPOConfig(_PairRunConfig):
    """A preference-training run. `automodel-rl dpo --help` lists all keys.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "pairs.jsonl"}]}}
        >>> values |= {"batch": {"pairs": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> DPOConfig(output="runs/mine", **values).loss.variant
        'dpo'
    """

    algorithm: Literal["dpo"] = "dpo"
    """Preference training on pairs of a chosen and a rejected completion."""

    loss: DPOLossConfig = DPOLossConfig()

    precompute_reference: bool = False
    """Compute the reference's log-probabilities of all pairs before the first step and keep them in place of its
    weights. Saves the reference forward in each step, at the cost of an initial pass over the data."""

    @property
    def record_type(self) -> Records:
        """Type of the data's records: two completions of a prompt."""
        return "pairs"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is kept."""
        return self.loss.needs_reference


class KTOConfig(_SequenceRunConfig):
    """A run of preference training on single completions. `automodel-rl kto --help` lists all keys.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "judged.jsonl"}]}}
        >>> values |= {"batch": {"sequences": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> KTOConfig(output="runs/mine", **values).loss.beta
        0.1
    """

    algorithm: Literal["kto"] = "kto"
    """Preference training on single completions labelled good or bad (Ethayarajh et al., arXiv:2402.01306)."""

    data: LabelledDataConfig
    loss: KTOLossConfig = KTOLossConfig()

    @property
    def record_type(self) -> Records:
        """Type of the data's records: a completion of a prompt, labelled good or bad."""
        return "judged"

    @property
    def needs_reference(self) -> bool:
        """True: the loss compares with the reference policy."""
        return True

    @model_validator(mode="after")
    def _prompts_to_compare(self) -> "KTOConfig":
        if self.loss.reference_point == "batch" and self.batch.sequences < 2:
            raise ValueError(
                "batch.sequences=1: the reference point comes from completions of other prompts: use at least 2, or "
                "loss.reference_point=zero"
            )
        return self


class RewardModelConfig(_PairRunConfig):
    """A run that trains a reward model. `automodel-rl reward --help` lists all keys.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "pairs.jsonl"}]}}
        >>> values |= {"batch": {"pairs": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> RewardModelConfig(output="runs/mine", **values).model.num_labels
        1
    """

    algorithm: Literal["reward"] = "reward"
    """A reward model from pairs of a chosen and a rejected completion (Bradley-Terry)."""

    data: RankedDataConfig
    loss: RewardLossConfig = RewardLossConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_score(cls, values: Any) -> Any:
        """Sets the model's linear head to one output."""
        model = values.get("model") if isinstance(values, dict) else None
        if not isinstance(model, dict):
            return values
        given = model.get("num_labels")
        if given not in (None, 1):
            raise ValueError(f"model.num_labels={given}: a reward model returns one score: remove it")
        return {**values, "model": {**model, "num_labels": 1}}

    @property
    def record_type(self) -> Records:
        """Type of the data's records: two completions of a prompt, optionally with a margin."""
        return "ranked pairs"

    @property
    def trains_linear_head(self) -> bool:
        """True: the score comes from a linear head."""
        return True

    @property
    def compares_logprobs(self) -> bool:
        """False: there are no log-probabilities."""
        return False


class DistillConfig(_SequenceRunConfig):
    """A distillation run. `automodel-rl distill --help` lists all keys.

    Example:
        >>> values = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": [{"path": "chats.jsonl"}]}}
        >>> values |= {"batch": {"sequences": 8, "microbatch_tokens": 4096}, "length": {"steps": 10}}
        >>> DistillConfig(output="runs/mine", teachers={"large": {"path": "Qwen/Qwen3-8B"}}, **values).loss.top_k
        64
    """

    algorithm: Literal["distill"] = "distill"
    """Distillation of teachers into a student, on chats."""

    data: DataConfig
    teachers: Annotated[dict[str, TeacherConfig], Field(min_length=1)]
    """Teachers, by names of your choice. Each teaches the data sources that it lists."""

    loss: DistillLossConfig = DistillLossConfig()

    @property
    def record_type(self) -> Records:
        """Type of the data's records: chats or texts."""
        return "chats"

    @property
    def further_models(self) -> dict[str, FurtherModel]:
        """The teachers on the run's ranks, by name."""
        return local(self.teachers, self.model)

    @model_validator(mode="after")
    def _teachers_can_tell(self) -> "DistillConfig":
        check_can_compare(self.teachers, self.loss, self.loss.temperature)
        return self
