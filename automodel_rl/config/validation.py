"""Evaluations beside held-out data: harnesses that call the run's own generators."""

from typing import Annotated

from pydantic import Field

from automodel_rl.config.base import Positive, Section


class HarnessConfig(Section):
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    """The tasks: names that the harness knows, or for inspect files with tasks."""

    python: str
    """Interpreter of an environment with the harness."""

    limit: Positive | None = None
    """Most samples of each task; null for all."""

    quiet_minutes: Annotated[float, Field(gt=0)] = 30.0
    """Most minutes without a request. After that the harness counts as hanging: it is ended, and the run goes on
    without its metrics. Ranks wait meanwhile, so that this is less than `failures.hang_minutes`."""

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further options of its command line, e.g. num_fewshot of lm-eval."""


class LmEvalConfig(HarnessConfig):
    chat: bool = False
    """Ask by chats, with the model's chat template, in place of completions. Tasks that compare log-probabilities need
    completions."""

    include: str | None = None
    """Folder with tasks of your own."""


class InspectConfig(HarnessConfig):
    """Tasks of inspect-ai."""


class ValidationConfig(Section):
    """Evaluations that are measured with the held-out data, every `length.validate_every` steps, before the first step
    and at the end."""

    lm_eval: LmEvalConfig | None = None
    """Tasks of lm-eval (lm-evaluation-harness). Their metrics are val/TASK/METRIC."""

    inspect: InspectConfig | None = None
    """Tasks of inspect-ai. Their metrics are val/TASK/SCORE_METRIC."""
