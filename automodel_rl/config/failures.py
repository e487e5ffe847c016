"""What counts as a failure."""

from typing import Annotated

from pydantic import Field

from automodel_rl.config.base import Section


class FailuresConfig(Section):
    hang_minutes: Annotated[float, Field(gt=0)] | None = 60.0
    """Minutes in which a rank may do one thing, such as one microbatch or one batch of rollouts, before it counts as
    hanging and the job ends; null waits for ever."""
