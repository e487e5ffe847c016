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


class TeacherConfig(Section):
    """A model that a student learns from. It has the student's tokenizer, and any architecture that is supported.

    Example:
        >>> TeacherConfig(path="Qwen/Qwen3-8B", between="host").dtype is None
        True
    """

    path: PathText
    """Folder of the teacher's checkpoint, or its hub id."""

    sources: tuple[PathText, ...] = ()
    """The data that it teaches, by the `path` of sources in data.train and data.validation. Empty: all data that no
    other teacher names."""

    dtype: Dtype | None = None
    """Precision in which it computes; null takes model.dtype."""

    attention: Attention = "auto"
    """Its attention kernel, as model.attention."""

    between: Between = "device"
    """Place of its weights while it does not compute. host: in host memory, so that teacher and student have the
    device's memory in turns; they are copied to the device and back in each step."""

    def further_model(self, key: str, student: ModelConfig) -> FurtherModel:
        """What a run asks for.

        Args:
            key: the section of the config that this one is.
            student: the section of the trained model.
        """
        model = ModelConfig(
            path=self.path,
            dtype=self.dtype or student.dtype,
            attention=self.attention,
            trust_remote_code=student.trust_remote_code,
        )
        return FurtherModel(model, key, between=self.between)
