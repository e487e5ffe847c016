"""Distillation: what a student learns of its teachers' distributions."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Fraction, Positive, Section

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "mixed"]


class DistillLossConfig(Section):
    """The loss of distillation: the divergence of each token between the student's distribution p and the teacher's q
    (Hinton et al., arXiv:1503.02531), over the teacher's likeliest tokens.

    Example:
        >>> DistillLossConfig(divergence="reverse_kl").outside
        'tail'
    """

    divergence: Divergence = "forward_kl"
    """forward_kl: KL(q || p), which covers all that the teacher says. reverse_kl: KL(p || q), which settles on a part
    of it (MiniLLM, arXiv:2306.08543). jsd: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p
    (GKD, arXiv:2306.13649, eq. 1). mixed: beta KL(q || p) + (1 - beta) KL(p || q)."""

    beta: Fraction = 0.5
    """The weight in jsd and mixed."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The logits of both are divided by it. The loss is not multiplied by its square."""

    top_k: Positive = 64
    """Number of tokens at each place that the divergence compares one by one. With as many as the vocabulary has, the
    divergence is exact."""

    tokens_of: Literal["teacher", "student", "both"] = "teacher"
    """Whose likeliest tokens these are; both: the tokens that are among either's."""

    outside: Literal["tail", "renormalise", "drop"] = "tail"
    """What becomes of all other tokens. tail: together they count as one more token, so that the student cannot hide
    probability there. renormalise: p and q are those among the chosen tokens; nothing holds what lies outside. drop:
    they count nowhere, so that the sum is no divergence and may be negative; with reverse_kl the student then learns to
    move probability outside."""

    scaled_likelihood: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the negative log-likelihood of the data's tokens, which is added. It is computed from the student's
    logits divided by `temperature`, so it is the loss of sft only if that is 1."""

    @model_validator(mode="after")
    def _holds_together(self) -> "DistillLossConfig":
        if self.beta != 0.5 and self.divergence not in ("jsd", "mixed"):
            raise ValueError(f"beta={self.beta} is for jsd and mixed, not {self.divergence}: leave it out")
        if self.outside == "drop" and self.divergence != "forward_kl":
            raise ValueError(
                f"outside=drop with divergence={self.divergence}: the student would lower the loss by moving "
                "probability to tokens that do not count: use tail or renormalise"
            )
        return self


class OnPolicyDistillationConfig(Section):
    """What teachers add to advantages or to the loss. To advantages: for each token that the policy has written, the
    logarithm of how much likelier it is under the teacher. Its mean is the negative reverse divergence from the teacher
    (Lu et al., "On-policy distillation", thinkingmachines.ai/blog/on-policy-distillation).

    Example:
        >>> OnPolicyDistillationConfig(coefficient=0.5).discount
        0.0
    """

    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """The factor of the logarithm, or of the divergence. It is added to what rewards give, if there are any."""

    discount: Fraction = 0.0
    """A token also gets what later tokens of its row get, each with this factor for every token in between. 0: only its
    own."""

    loss: DistillLossConfig | None = None
    """Compares distributions in place of written tokens: the divergence from the teacher at each place of a completion,
    as a part of the loss (GKD, arXiv:2306.13649). It has much less variance than the logarithm of one token. Its
    temperature is that of rollouts, and need not be given. null: the logarithm, in advantages."""

    @model_validator(mode="after")
    def _discounts_advantages(self) -> "OnPolicyDistillationConfig":
        if self.loss is not None and self.discount:
            raise ValueError(
                f"discount={self.discount:g} is for advantages, and loss has the divergence in the loss: leave one out"
            )
        return self
