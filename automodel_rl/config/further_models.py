"""Additional models on the ranks and layout of the trained one: teachers and critics."""

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
    """An additional model as requested by the config.

    Attributes:
        model: checkpoint and precision.
        key: config section that requests it, for error messages.
        is_trained: whether the run trains it.
        between: where its weights are kept while it is idle.

    Example:
        >>> FurtherModel(ModelConfig(path="Qwen/Qwen3-8B"), "teachers.large").is_trained
        False
    """

    model: ModelConfig
    key: str
    is_trained: bool = False
    between: Between = "device"


class FrozenModelConfig(Section):
    """An additional model that is not trained, of any supported architecture.

    Example:
        >>> FrozenModelConfig(path="Qwen/Qwen3-8B", between="host").dtype is None
        True
    """

    path: PathText
    """Folder or hub id of its checkpoint."""

    dtype: Dtype | None = None
    """Compute precision; null: model.dtype."""

    attention: Attention = "auto"
    """Attention kernel, with the values of model.attention."""

    between: Between = "device"
    """Location of its weights while it is idle. host: in host memory, copied to the device for every pass."""

    def further_model(self, key: str, trained: ModelConfig) -> FurtherModel:
        """Returns the request for this model.

        Args:
            key: config section of this model, for error messages.
            trained: the section of the trained model, which provides defaults.
        """
        model = ModelConfig(
            path=self.path,
            dtype=self.dtype or trained.dtype,
            attention=self.attention,
            trust_remote_code=trained.trust_remote_code,
        )
        return FurtherModel(model, key, between=self.between)


class TeacherConfig(FrozenModelConfig):
    """A model that a student learns from. It must have the student's tokenizer.

    Example:
        >>> TeacherConfig(path="Qwen/Qwen3-8B", sources=("data/math.jsonl",)).between
        'device'
    """

    sources: tuple[PathText, ...] = ()
    """Data sources for which it is the teacher, by their `path` in data.train and data.validation. Empty: all sources
    that no other teacher lists."""

    url: Annotated[str, Field(pattern="^https?://")] | None = None
    """URL of a server that runs the teacher, which then takes no memory here; `path` still provides its tokenizer and
    config. null: its weights are loaded on the run's ranks."""

    api: Literal["vllm", "tinker"] = "vllm"
    """API of the server. vllm: `vllm serve`, with `--max-logprobs` of at least loss.top_k; it returns only its own most
    likely tokens. tinker: Tinker's API, as served by `automodel-rl serve`, with the key in TINKER_API_KEY."""

    name: str | None = None
    """Name of the model on the server, or the tinker:// path of its weights; null: `path`."""

    @property
    def is_remote(self) -> bool:
        """Whether it runs on a server."""
        return self.url is not None

    @model_validator(mode="after")
    def _is_here_or_there(self) -> "TeacherConfig":
        # model_fields_set would not do: a saved config.yaml sets every key.
        changed = [key for key, info in type(self).model_fields.items() if getattr(self, key) != info.default]
        own = [key for key in ("dtype", "attention", "between") if key in changed]
        there = [key for key in ("api", "name") if key in changed]
        if self.is_remote and own:
            raise ValueError(f"{own[0]} with url={self.url}: the server decides this: remove it")
        if not self.is_remote and there:
            raise ValueError(f"{there[0]} is for a teacher behind a server: set its url, or remove it")
        return self


def local(teachers: Mapping[str, TeacherConfig], student: ModelConfig) -> dict[str, FurtherModel]:
    """Returns the requests for all teachers that run on the job's ranks, by name. `student` is the section of the
    trained model."""
    here = {name: one for name, one in teachers.items() if not one.is_remote}
    return {name: one.further_model(f"teachers.{name}", student) for name, one in here.items()}


def check_can_compare(
    teachers: Mapping[str, TeacherConfig], loss: DistillLossConfig | None, temperature: float
) -> None:
    """Raises ValueError if a remote teacher cannot provide the required log-probabilities.

    Args:
        teachers: by name.
        loss: the divergence from the teachers; None if only generated tokens are scored.
        temperature: sampling temperature of those log-probabilities.
    """
    for name, one in teachers.items():
        if one.is_remote and temperature != 1.0:
            raise ValueError(
                f"teachers.{name}.url with a temperature of {temperature:g}: servers return log-probabilities at "
                "temperature 1: use 1, or a teacher on the run's ranks"
            )
        if one.is_remote and one.api == "vllm" and loss is not None and loss.tokens_of != "teacher":
            raise ValueError(
                f"teachers.{name}.url with tokens_of={loss.tokens_of}: vLLM returns log-probabilities of its own most "
                "likely tokens: use tokens_of=teacher, or api=tinker"
            )
