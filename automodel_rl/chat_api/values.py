"""Field types of requests with their limits, and the base class of requests."""

import itertools
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from automodel_rl.errors import InputError

MAX_DEPTH = 64
"""Maximum nesting depth of a JSON value, which is rendered and compared recursively."""


def check_depth(value: Any, what: str) -> None:
    """Raises InputError if a JSON value is nested deeper than `MAX_DEPTH`. `what` names the value in the error."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = list(itertools.chain.from_iterable(inner))
        if not level:
            return
    raise InputError(f"{what}: is nested deeper than {MAX_DEPTH} objects and lists: flatten it")


Text = Annotated[str, Field(max_length=1024)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]

MIN_TEMPERATURE = 0.01
"""Smallest temperature other than 0. vLLM raises smaller ones to this."""


def _known_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    return value


Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False), AfterValidator(_known_temperature)]
TopP = Annotated[float, Field(ge=1e-6, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
StopTexts = Annotated[list[StopText], Field(max_length=64)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())
