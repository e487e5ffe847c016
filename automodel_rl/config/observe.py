"""What a run shows besides its metrics."""

from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import Positive, Section

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class ObserveConfig(Section):
    samples: Annotated[int, Field(ge=0)] = 4
    """Completions of the trained model in report.html, greedy, for prompts of the validation (else training) data."""

    sample_tokens: Positive = 64
    """Longest of these completions."""

    trackers: tuple[TrackerName, ...] = ()
    """Where metrics go besides metrics.jsonl: TensorBoard files in the run directory, Weights & Biases, trackio."""

    project: str = "automodel_rl"
    """Project of the run for these trackers."""
