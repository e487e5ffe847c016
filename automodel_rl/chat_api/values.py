"""Values of requests with their limits, and the base of requests."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=1024)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]

LEAST_TEMPERATURE = 0.01
"""Smallest temperature besides 0. vLLM takes this one in place of a smaller one."""


def _known_temperature(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"must be 0, which takes the likeliest token, or at least {LEAST_TEMPERATURE}")
    return value


Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False), AfterValidator(_known_temperature)]
TopP = Annotated[float, Field(ge=1e-6, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
StopTexts = Annotated[list[StopText], Field(max_length=64)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())
