"""Models beside the trained one, on the same ranks and layout: teachers, critics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import PathText, Section
from automodel_rl.config.distillation import DistillLossConfig
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

    url: Annotated[str, Field(pattern="^https?://")] | None = None
    """Address of a server that has the teacher, which then needs no memory here; `path` has its tokenizer and config.
    null: its weights are loaded on the run's ranks."""

    api: Literal["vllm", "tinker"] = "vllm"
    """What the server speaks. vllm: `vllm serve`, with `--max-logprobs` of at least loss.top_k; it knows its own
    likeliest tokens alone. tinker: Tinker's API, as `automodel-rl serve` does, with the key in TINKER_API_KEY."""

    name: str | None = None
    """Name of the model at the server, or the tinker:// path of its weights; null: `path`."""

    @property
    def is_remote(self) -> bool:
        """Whether it is behind a server."""
        return self.url is not None

    @model_validator(mode="after")
    def _is_here_or_there(self) -> "TeacherConfig":
        # A run's config.yaml has all keys, those with their defaults too.
        changed = [key for key, info in type(self).model_fields.items() if getattr(self, key) != info.default]
        own = [key for key in ("dtype", "attention", "between") if key in changed]
        there = [key for key in ("api", "name") if key in changed]
        if self.is_remote and own:
            raise ValueError(f"{own[0]} with url={self.url}: the server decides that: leave it out")
        if not self.is_remote and there:
            raise ValueError(f"{there[0]} is for a teacher behind a server: give its url, or leave it out")
        return self


def local(teachers: Mapping[str, TeacherConfig], student: ModelConfig) -> dict[str, FurtherModel]:
    """Those teachers that are on the run's ranks, as it asks for them.

    Args:
        teachers: all teachers by name.
        student: the section of the trained model.
    """
    here = {name: one for name, one in teachers.items() if not one.is_remote}
    return {name: one.further_model(f"teachers.{name}", student) for name, one in here.items()}


def check_can_compare(
    teachers: Mapping[str, TeacherConfig], loss: DistillLossConfig | None, temperature: float
) -> None:
    """Raises ValueError if a teacher behind a server cannot say what is asked.

    Args:
        teachers: the teachers by name.
        loss: the divergence from them; None if they judge written tokens alone.
        temperature: the temperature at which they are asked.
    """
    for name, one in teachers.items():
        if one.is_remote and temperature != 1.0:
            raise ValueError(
                f"teachers.{name}.url with a temperature of {temperature:g}: servers give log-probabilities at 1: "
                "use 1, or a teacher on the run's ranks"
            )
        if one.is_remote and one.api == "vllm" and loss is not None and loss.tokens_of != "teacher":
            raise ValueError(
                f"teachers.{name}.url with tokens_of={loss.tokens_of}: vLLM gives log-probabilities of its own "
                "likeliest tokens: use tokens_of=teacher, or api=tinker"
            )
