"""What a run shows besides its metrics."""

from typing import Annotated

from pydantic import Field

from automodel_rl.config.base import Positive, Section


class ObserveConfig(Section):
    samples: Annotated[int, Field(ge=0)] = 4
    """Completions of the trained model in report.html, greedy, for prompts of the validation (else training) data."""

    sample_tokens: Positive = 64
    """Longest of these completions."""
