"""AdamW, its learning-rate schedule and its safeguards."""

from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import Fraction, Positive, Section


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101) on master weights.

    Example:
        >>> OptimizerConfig(lr=3e-6, decay="constant").betas
        (0.9, 0.95)
    """

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of the moving averages of gradient and squared gradient."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second average."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of matrices and embeddings; biases and norm weights are never decayed."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global norm; null leaves them alone."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""

    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after the warm-up; it would reach `min_lr_ratio` one step after the last."""

    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a fraction of the peak."""

    max_skipped_steps: Positive = 10
    """Steps in a row with a loss or gradient that is not finite after which the run stops; each is skipped."""
