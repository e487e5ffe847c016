"""When checkpoints are written and which are kept."""

from typing import Annotated

from pydantic import Field

from automodel_rl.config.base import Positive, Section


class CheckpointConfig(Section):
    every: Positive | None = None
    """Steps between checkpoints; null writes them only on SIGTERM."""

    keep_last: Positive = 2
    """Newest checkpoints kept."""

    keep_best: Annotated[bool, Field()] = True
    """Also keep the one with the lowest val/loss."""
