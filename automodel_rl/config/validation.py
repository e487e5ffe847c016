"""Additional evaluations: harnesses that call the run's own generators."""

from typing import Annotated

from pydantic import Field

from automodel_rl.config.base import Positive, Section


class HarnessConfig(Section):
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """Task names that the harness knows, or for inspect also files with tasks."""

    python: str
    """Python interpreter of an environment with the harness."""

    limit: Positive | None = None
    """Maximum samples per task; null: all."""

    quiet_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Maximum minutes without a request. Then the harness counts as hung and is terminated, and the run continues
    without its metrics. Must be less than `failures.hang_minutes`, since ranks wait meanwhile."""

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further command-line options, e.g. num_fewshot of lm-eval."""


class LmEvalConfig(HarnessConfig):
    chat: bool = False
    """Send chats, formatted with the model's chat template, rather than plain completions. Tasks that compare
    log-probabilities need completions."""

    include: str | None = None
    """Folder with custom tasks."""


class InspectConfig(HarnessConfig):
    """Tasks of inspect-ai."""


class ValidationConfig(Section):
    """Evaluations that run with each validation on held-out data: every `length.validate_every` steps, before the first
    step and at the end."""

    lm_eval: LmEvalConfig | None = None
    """Tasks of lm-eval (lm-evaluation-harness). Metrics are named val/TASK/METRIC."""

    inspect: InspectConfig | None = None
    """Tasks of inspect-ai. Metrics are named val/TASK/SCORE_METRIC."""
