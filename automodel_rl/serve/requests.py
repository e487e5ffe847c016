"""The JSON requests of Tinker's API (client 0.38), checked. Fields that this server does not read are ignored."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
"""A name of saved weights. It becomes the name of a folder."""

Text = Annotated[str, Field(max_length=1024)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Name = Annotated[str, Field(pattern=NAME)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class NoBody(Body):
    """A request of which nothing is read."""


class SessionBody(Body):
    session_id: Text


class LoraBody(Body):
    rank: Number
    seed: Number | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(Body):
    type: Text = "adamw"


class CreateModelBody(Body):
    session_id: Text
    model_seq_id: Number
    base_model: Text
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerKind | None = None
    user_metadata: dict[str, Any] | None = None


class ModelBody(Body):
    model_id: Text


class AdamBody(Body):
    learning_rate: Annotated[Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Finite, Field(ge=1e-30)] = 1e-12
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[Finite, Field(ge=0)] = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `AdamWSettings`."""
        return {
            "lr": self.learning_rate,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.grad_clip_norm or None,
        }


class TurnBody(Body):
    """A request that has its turn in a run."""

    model_id: Text
    seq_id: Annotated[int, Field(ge=1, lt=2**31)]


class OptimStepBody(TurnBody):
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(TurnBody):
    path: Name | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = True
    user_metadata: dict[str, Any] | None = None
    kind: Literal["snapshot", "inflight"] | None = None


class LoadBody(Body):
    model_id: Text | None = None
    seq_id: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    session_id: Text | None = None
    model_seq_id: Number | None = None
    path: Text
    optimizer: bool = False
    user_metadata: dict[str, Any] | None = None


class SamplingSessionBody(Body):
    session_id: Text
    sampling_session_seq_id: Number
    model_path: Text | None = None
    base_model: Text | None = None


class ChunkBody(Body):
    type: Text = "encoded_text"
    tokens: list[Token] | None = None


class PromptBody(Body):
    chunks: list[ChunkBody]


class SamplingBody(Body):
    max_tokens: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    seed: Seed | None = None
    stop: StopText | list[StopText] | list[Token] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(Body):
    sampling_session_id: Text
    seq_id: Number
    num_samples: Annotated[int, Field(gt=0)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Number | None = None
    topk_sample_logprobs: Number | None = None
    target_prompt_logprobs: bool | None = None
    prompt_alt_tokens_k: Number | None = None


class FutureBody(Body):
    request_id: Text


def number_of(value: float | None, text: str | None) -> float | None:
    """The value of a loss's setting; None if it is no finite number."""
    if value is None or text is not None or not math.isfinite(value):
        return None
    return value
