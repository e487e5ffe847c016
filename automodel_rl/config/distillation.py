"""Distillation: how a student learns from its teachers' distributions."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Fraction, Positive, Section

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "mixed"]


class DistillLossConfig(Section):
    """The distillation loss: the divergence between the student's distribution p and the teacher's q for each token
    (Hinton et al., arXiv:1503.02531), over the `top_k` most likely tokens.

    Example:
        >>> DistillLossConfig(divergence="reverse_kl").outside
        'tail'
    """

    divergence: Divergence = "forward_kl"
    """forward_kl: KL(q || p), which covers all of the teacher's modes. reverse_kl: KL(p || q), which concentrates on
    some of them (MiniLLM, arXiv:2306.08543). jsd: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta)
    p (GKD, arXiv:2306.13649, eq. 1). mixed: beta KL(q || p) + (1 - beta) KL(p || q)."""

    beta: Fraction = 0.5
    """Interpolation weight of jsd and mixed."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of both models. The loss is not multiplied by its square."""

    top_k: Positive = 64
    """Number of tokens per position that the divergence compares individually. Exact if it is the vocabulary size."""

    tokens_of: Literal["teacher", "student", "both"] = "teacher"
    """Model whose most likely tokens are compared; both: the union."""

    outside: Literal["tail", "renormalise", "drop"] = "tail"
    """Treatment of all other tokens. tail: they count as one additional token, so that the student cannot hide
    probability there. renormalise: p and q are normalised over the chosen tokens, and probability outside is
    unconstrained. drop: they are ignored, so the sum is not a divergence and may be negative; forward_kl only, because
    the other divergences would reward moving probability outside."""

    scaled_likelihood: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an additional loss: the negative log-likelihood of the data's tokens, computed from the student's
    logits divided by `temperature`, so it equals the loss of sft only at temperature 1."""

    @model_validator(mode="after")
    def _holds_together(self) -> "DistillLossConfig":
        if self.beta != 0.5 and self.divergence not in ("jsd", "mixed"):
            raise ValueError(f"beta={self.beta} is for jsd and mixed, not {self.divergence}: remove it")
        if self.outside == "drop" and self.divergence != "forward_kl":
            raise ValueError(
                f"outside=drop with divergence={self.divergence}: the student would lower the loss by moving "
                "probability to tokens that do not count: use tail or renormalise"
            )
        return self


class OnPolicyDistillationConfig(Section):
    """The teachers' contribution to advantages or to the loss. In advantages: log q - log p of each generated token,
    whose mean is the negative reverse KL divergence from the teacher (Lu et al., "On-policy distillation",
    thinkingmachines.ai/blog/on-policy-distillation).

    Example:
        >>> OnPolicyDistillationConfig(coefficient=0.5).discount
        0.0
    """

    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the teachers' contribution, which is added to that of the rewards, if there are any."""

    discount: Fraction = 0.0
    """Discount factor per token with which the terms of later tokens of the row are added to a token's advantage. 0:
    each token gets only its own."""

    loss: DistillLossConfig | None = None
    """Compare whole distributions rather than the generated tokens: the divergence from the teacher at each position of
    a completion becomes part of the loss (GKD, arXiv:2306.13649), with much less variance. Its temperature defaults to
    that of rollouts. null: log-ratios of generated tokens, in advantages."""

    @model_validator(mode="after")
    def _discounts_advantages(self) -> "OnPolicyDistillationConfig":
        if self.loss is not None and self.discount:
            raise ValueError(
                f"discount={self.discount:g} is for advantages, but loss adds the divergence to the loss: remove one "
                "of them"
            )
        return self
