"""Models beside the trained one, on the same ranks and layout: teachers, critics."""

from dataclasses import dataclass
from typing import Literal

from automodel_rl.config.base import PathText, Section
from automodel_rl.config.model import Attention, Dtype, ModelConfig

Between = Literal["device", "host"]


@dataclass(frozen=True)
class FurtherModel:
    """A model beside the trained one, as a run asks for it.

    Attributes:
        model: its checkpoint and precision.
        key: the section of the config that asks for it, for error messages.
        is_trained: whether the run trains it, too.
        between: where its weights are while it does not compute.

    Example:
        >>> FurtherModel(ModelConfig(path="Qwen/Qwen3-8B"), "teachers.large").is_trained
        False
    """

    model: ModelConfig
    key: str
    is_trained: bool = False
    between: Between = "device"


class FrozenModelConfig(Section):
    """A model beside the trained one, which is not trained: of any architecture that is supported.

    Example:
        >>> FrozenModelConfig(path="Qwen/Qwen3-8B", between="host").dtype is None
        True
    """

    path: PathText
    """Folder of its checkpoint, or its hub id."""

    dtype: Dtype | None = None
    """Precision in which it computes; null takes model.dtype."""

    attention: Attention = "auto"
    """Its attention kernel, as model.attention."""

    between: Between = "device"
    """Place of its weights while it does not compute. host: in host memory; they are copied to the device whenever it
    computes."""

    def further_model(self, key: str, trained: ModelConfig) -> FurtherModel:
        """What a run asks for.

        Args:
            key: the section of the config that this one is.
            trained: the section of the trained model.
        """
        model = ModelConfig(
            path=self.path,
            dtype=self.dtype or trained.dtype,
            attention=self.attention,
            trust_remote_code=trained.trust_remote_code,
        )
        return FurtherModel(model, key, between=self.between)


class TeacherConfig(FrozenModelConfig):
    """A model that a student learns from. It has the student's tokenizer.

    Example:
        >>> TeacherConfig(path="Qwen/Qwen3-8B", sources=("data/math.jsonl",)).between
        'device'
    """

    sources: tuple[PathText, ...] = ()
    """The data that it teaches, by the `path` of sources in data.train and data.validation. Empty: all data that no
    other teacher names."""
