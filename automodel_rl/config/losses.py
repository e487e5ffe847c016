"""What preference and policy-gradient losses compute; the losses themselves take these sections."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Positive, Section


class DPOLossConfig(Section):
    """Of a pair, m = l(chosen) - l(rejected), where l is a completion's log-probability less the reference's.

    Example:
        >>> DPOLossConfig(variant="simpo", beta=2.0).needs_reference
        False
    """

    variant: Literal["dpo", "ipo", "simpo"] = "dpo"
    """dpo: -log sigmoid(beta m), l summed over tokens (Rafailov et al., arXiv:2305.18290, eq. 7).
    ipo: (m - 1 / (2 beta))^2, l averaged over tokens (Azar et al., arXiv:2310.12036, eq. 17).
    simpo: -log sigmoid(beta m - gamma), l averaged over tokens, no reference (Meng et al., arXiv:2405.14734, eq. 6)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the preference; the smaller, the farther the policy may go from the reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be the wrong way round, for dpo (Mitchell, "A note on DPO with noisy preferences")."""

    length_normalised: bool = False
    """Average over tokens where dpo sums; ipo and simpo always do."""

    gamma: Annotated[float, Field(ge=0)] = 0.5
    """Margin that simpo asks for."""

    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Adds this times the chosen completion's negative log-likelihood per token (Pang et al., arXiv:2404.19733)."""

    @property
    def needs_reference(self) -> bool:
        """Whether batches need `ref_logprobs`."""
        return self.variant != "simpo"

    @model_validator(mode="after")
    def _smoothing(self) -> "DPOLossConfig":
        if self.label_smoothing and self.variant != "dpo":
            raise ValueError(f"label_smoothing={self.label_smoothing} is for variant=dpo only: set it to 0")
        return self


class CorrectionConfig(Section):
    """Of the difference between the generator that wrote a completion and the policy that learns from it: tokens are
    weighted by w = exp(old_logprobs - rollout_logprobs).

    Example:
        >>> CorrectionConfig(kind="truncate").high
        2.0
    """

    kind: Literal["none", "truncate", "icepop", "sequence_mask"] = "none"
    """truncate: w clipped into [low, high] (Ionides, "Truncated importance sampling", 2008).
    icepop: tokens with w outside of [low, high] count nothing (Ling team, arXiv:2510.18855).
    sequence_mask: sequences whose geometric mean of w is outside count nothing, the others' tokens weigh w."""

    low: Annotated[float, Field(ge=0)] = 0.0
    """Smallest weight."""

    high: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""

    @model_validator(mode="after")
    def _order(self) -> "CorrectionConfig":
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: swap them")
        return self


class KLConfig(Section):
    """Distance from the reference policy; r = ref_logprobs - logprobs (Schulman, "Approximating KL divergence").

    Example:
        >>> KLConfig(coefficient=0.001).estimator
        'k3'
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight; at 0 no reference weights are kept."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1: -r, unbiased. k2: r^2 / 2, biased, little variance. k3: exp(r) - 1 - r, unbiased and never negative."""

    where: Literal["loss", "reward"] = "loss"
    """Added to the loss of every token, or, summed over a completion, taken off its reward."""


class PolicyLossConfig(Section):
    """A policy-gradient loss. With A a token's advantage and q = exp(logprobs - old_logprobs), the default is PPO's
    -min(q A, clip(q) A) (Schulman et al., arXiv:1707.06347, eq. 7), as in GRPO (Shao et al., arXiv:2402.03300).

    Example:
        >>> PolicyLossConfig(clip_high=0.28, ratio="sequence").normalise
        'token'
    """

    surrogate: Literal["clip", "cispo"] = "clip"
    """clip: PPO's. cispo: -A stop_gradient(clip(q)) logprobs, where clipped tokens still learn (MiniMax,
    arXiv:2506.13585, eq. 4)."""

    ratio: Literal["token", "sequence"] = "token"
    """sequence: one q for a completion, the geometric mean of its tokens' (GSPO; Zheng et al., arXiv:2507.18071)."""

    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """q is clipped below 1 - clip_low."""

    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """q is clipped above 1 + clip_high; more than clip_low leaves room to explore (DAPO, arXiv:2503.14476)."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where A < 0 the loss is at most -dual_clip A (Ye et al., arXiv:1912.09729, eq. 5)."""

    normalise: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all tokens (DAPO). sequence: mean over each completion, then over completions (GRPO).
    constant: sum over a completion divided by the longest allowed, then mean (Dr. GRPO; Liu et al.,
    arXiv:2503.20783)."""

    on_policy: bool = False
    """Takes old_logprobs to be the current ones, so that they need no forward of their own; right when a rollout batch
    makes a single optimizer step."""

    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a bonus for the policy's entropy."""

    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()

    max_completion_tokens: Positive | None = None
    """What `normalise: constant` divides by; by default rollout.max_new_tokens."""

    @model_validator(mode="after")
    def _parts_that_exclude_each_other(self) -> "PolicyLossConfig":
        if self.surrogate == "cispo" and (self.ratio == "sequence" or self.dual_clip is not None):
            raise ValueError("surrogate=cispo clips token ratios itself: use ratio=token and dual_clip=null")
        if self.clip_low > 1:
            raise ValueError(f"clip_low={self.clip_low}: a ratio is never negative, so at most 1: lower it")
        return self


class AdvantageConfig(Section):
    """What a completion's reward is compared with."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "grpo"
    """grpo: (reward - group mean) / group standard deviation (arXiv:2402.03300). dr_grpo: without the division
    (arXiv:2503.20783). rloo: less the mean of the group's others (Ahmadian et al., arXiv:2402.14740). reinforce: less
    the group mean, divided by the standard deviation over the batch (REINFORCE++ with baseline; Hu,
    arXiv:2501.03262)."""

    clip: Annotated[float, Field(gt=0)] | None = None
    """Advantages are clipped to [-clip, clip]."""
