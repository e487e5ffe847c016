"""Validated JSON requests of Tinker's API (client 0.38). Fields that the server does not read are ignored.

Every number is limited so that fp32 arithmetic on it does not overflow: that would fail the ranks instead of the
request.
"""

import json
import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, Field

from automodel_rl.chat_api.values import Body, Seed, StopText, StopTexts, Temperature, Text, Token, TopK, TopP
from automodel_rl.serve.arrays import SparsePositions

NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"
"""Name of saved weights, which becomes a folder name."""

Name = Annotated[str, Field(pattern=NAME)]

LARGEST = 1e30
"""Largest loss setting and gradient norm: fp32 ends at 3.4e38."""

SMALLEST = 1e-30
"""Smallest divisor: fp32 has full precision from 1.2e-38."""


def _known_norm(value: float) -> float:
    if 0 < value < SMALLEST:
        raise ValueError(f"must be 0 (no clipping) or at least {SMALLEST:g}")
    return value


MAX_METADATA = 64 * 2**10
"""Most bytes of JSON metadata of a session, run or save."""


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except ValueError:
        raise ValueError("has NaN or infinity, which JSON does not support: remove these values") from None
    if size > MAX_METADATA:
        raise ValueError(f"has {size} bytes: at most {MAX_METADATA}")
    return value


Metadata = Annotated[dict[str, Any], AfterValidator(_storable)]
Seconds = Annotated[float, Field(gt=0, le=3.2e9, allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
StopTokens = Annotated[list[Token], Field(max_length=64)]


class NoBody(Body):
    """A request without fields."""


class NewSessionBody(Body):
    user_metadata: Metadata | None = None
    display_name: Text | None = None


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
    user_metadata: Metadata | None = None


class ModelBody(Body):
    model_id: Text


class AdamBody(Body):
    learning_rate: Annotated[float, Field(ge=0, le=1e6)] = 1e-4
    beta1: Annotated[float, Field(ge=0, le=0.999999)] = 0.9
    beta2: Annotated[float, Field(ge=0, le=0.999999)] = 0.95
    eps: Annotated[float, Field(ge=SMALLEST, le=1e6)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=LARGEST), AfterValidator(_known_norm)] = 0.0

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


class SequencedBody(Body):
    """A request with a turn in a run."""

    model_id: Text
    seq_id: Annotated[int, Field(ge=1, lt=2**31)]


class OptimStepBody(SequencedBody):
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(SequencedBody):
    path: Name | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = True
    user_metadata: Metadata | None = None
    kind: Literal["snapshot", "inflight"] | None = None


class LoadBody(Body):
    model_id: Text | None = None
    seq_id: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    session_id: Text | None = None
    model_seq_id: Number | None = None
    base_model: Text | None = None
    optimizer_config: OptimizerKind | None = None
    path: Text
    optimizer: bool = False
    user_metadata: Metadata | None = None


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
    stop: StopText | StopTexts | StopTokens | None = None
    temperature: Temperature = 1.0
    top_k: TopK = -1
    top_p: TopP = 1.0


class TokensBody(Body):
    """Two-dimensional, possibly sparse array of token ids."""

    data: list[Annotated[int, Field(ge=-1, lt=2**31)]]
    dtype: Literal["int64"]
    shape: tuple[Number, Number]
    sparse_crow_indices: list[Number] | None = None
    sparse_col_indices: list[Number] | None = None

    @property
    def positions(self) -> SparsePositions | None:
        """Positions of listed entries; None for a dense array."""
        if self.sparse_crow_indices is None or self.sparse_col_indices is None:
            return None
        return SparsePositions(
            np.array(self.sparse_crow_indices, np.int64), np.array(self.sparse_col_indices, np.int64)
        )


class SampleBody(Body):
    sampling_session_id: Text
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]  # copies of a client in other processes start at large numbers
    num_samples: Annotated[int, Field(gt=0)] = 1
    prompt: PromptBody
    sampling_params: SamplingBody
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Number | None = None
    topk_sample_logprobs: Number | None = None
    target_prompt_logprobs: TokensBody | None = None
    prompt_alt_tokens_k: Number | None = None
    prompt_logprobs_last_n: Number | None = None


class WeightsInfoBody(Body):
    tinker_path: Text


class TtlBody(Body):
    ttl_seconds: Seconds | None


class PageQuery(BaseModel):
    """Requested page of a list."""

    limit: Annotated[int, Field(ge=0)] = 20
    offset: Annotated[int, Field(ge=0)] = 0
    access_scope: Text = "owned"
    project_id: None = None

    @classmethod
    def of(cls, query: dict[str, str]) -> "PageQuery":
        return cls.model_validate(query)

    @property
    def places(self) -> slice:
        return slice(self.offset, self.offset + self.limit)

    def cursor(self, count: int) -> dict[str, int]:
        """The page's position in a list of `count` items, for the client."""
        return {"offset": self.offset, "limit": self.limit, "total_count": count}


class FutureBody(Body):
    request_id: Text


def number_of(value: float | None, text: str | None) -> float | None:
    """Returns a loss setting's value; None if it is not a number within the limits."""
    if value is None or text is not None or not math.isfinite(value) or abs(value) > LARGEST:
        return None
    return value
