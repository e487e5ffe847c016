"""Settings of the preference and policy-gradient losses. The losses themselves take these sections."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Positive, Section


class DPOLossConfig(Section):
    """The preference loss. For a pair, m = l(chosen) - l(rejected), where l is a completion's log-probability minus the
    reference's.

    Example:
        >>> DPOLossConfig(variant="simpo", beta=2.0).needs_reference
        False
    """

    variant: Literal["dpo", "ipo", "simpo"] = "dpo"
    """dpo: -log sigmoid(beta m), l summed over tokens (Rafailov et al., arXiv:2305.18290, eq. 7).
    ipo: (m - 1 / (2 beta))^2, l averaged over tokens (Azar et al., arXiv:2310.12036, eq. 17).
    simpo: -log sigmoid(beta m - gamma), l averaged over tokens, no reference (Meng et al., arXiv:2405.14734, eq. 6)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the preference. With a smaller beta the policy may move farther from the reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that dpo assumes to be labelled the wrong way round (Mitchell, "A note on DPO with noisy
    preferences")."""

    length_normalised: bool = False
    """Average l over tokens for dpo, in place of the sum. ipo and simpo always average."""

    gamma: Annotated[float, Field(ge=0)] = 0.5
    """Margin of simpo."""

    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an added loss: the chosen completion's negative log-likelihood per token (Pang et al.,
    arXiv:2404.19733)."""

    @property
    def needs_reference(self) -> bool:
        """Whether microbatches need `ref_logprobs`."""
        return self.variant != "simpo"

    @model_validator(mode="after")
    def _smoothing(self) -> "DPOLossConfig":
        if self.label_smoothing and self.variant != "dpo":
            raise ValueError(f"label_smoothing={self.label_smoothing} is for variant=dpo only: set it to 0")
        return self


class CorrectionConfig(Section):
    """Correction for the difference between the generator that wrote a completion and the policy that learns from it.
    Tokens are weighted by w = exp(old_logprobs - rollout_logprobs).

    Example:
        >>> CorrectionConfig(kind="truncate").high
        2.0
    """

    kind: Literal["none", "truncate", "icepop", "sequence_mask"] = "none"
    """none: no correction. truncate: w is clipped to [low, high] (Ionides, "Truncated importance sampling", 2008).
    icepop: tokens with w outside [low, high] get weight 0, others w (Ling team, arXiv:2510.18855). sequence_mask:
    sequences whose geometric mean of w is outside [low, high] get weight 0, tokens of others w."""

    low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound: of w, or of its geometric mean for sequence_mask."""

    high: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound: of w, or of its geometric mean for sequence_mask."""

    @model_validator(mode="after")
    def _order(self) -> "CorrectionConfig":
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: swap them")
        return self


class KLConfig(Section):
    """Penalty for the distance (KL divergence) from the reference policy. r = ref_logprobs - logprobs (Schulman,
    "Approximating KL divergence").

    Example:
        >>> KLConfig(coefficient=0.001).estimator
        'k3'
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the penalty. At 0 no reference is kept in memory."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence. k1: -r, unbiased. k2: r^2 / 2, biased, with little variance. k3: exp(r) - 1 - r,
    unbiased and never negative."""

    where: Literal["loss", "reward"] = "loss"
    """loss: the penalty is added to the loss of every token. reward: it is summed over a completion and subtracted from
    the completion's reward."""


class PolicyLossConfig(Section):
    """The policy-gradient loss. A is a token's advantage, and q = exp(logprobs - old_logprobs). The default is PPO's
    -min(q A, clip(q) A) (Schulman et al., arXiv:1707.06347, eq. 7), as in GRPO (Shao et al., arXiv:2402.03300).

    Example:
        >>> PolicyLossConfig(clip_high=0.28, ratio="sequence").normalise
        'token'
    """

    surrogate: Literal["clip", "cispo"] = "clip"
    """Loss of a token. clip: PPO's -min(q A, clip(q) A). cispo: -A stop_gradient(clip(q)) logprobs, where clipped
    tokens still have a gradient (MiniMax, arXiv:2506.13585, eq. 4)."""

    ratio: Literal["token", "sequence"] = "token"
    """token: every token has its own q. sequence: all tokens of a completion have the same q, the geometric mean of
    theirs (of an agent's episode: those of a row), and each has a gradient of its own, which a correction weighs alone
    (GSPO-token; Zheng et al., arXiv:2507.18071, eq. 14). Without a correction the gradient is that of GSPO, eq. 5."""

    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """The lower bound of clip(q) is 1 - clip_low."""

    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """The upper bound of clip(q) is 1 + clip_high. More than clip_low leaves room to explore (DAPO,
    arXiv:2503.14476)."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss of tokens with A < 0: it is at most -dual_clip A (Ye et al., arXiv:1912.09729, eq. 5)."""

    normalise: Literal["token", "sequence", "constant"] = "token"
    """How losses of tokens are averaged. token: the mean over all tokens (DAPO). sequence: the mean over each
    completion's tokens, then the mean over completions (GRPO). constant: the sum over each completion's tokens, divided
    by the length of the longest completion allowed, then the mean over completions (Dr. GRPO; Liu et al.,
    arXiv:2503.20783). An agent's episode counts as one completion, whatever its number of rows."""

    on_policy: Literal["auto"] | bool = "auto"
    """Take the current log-probabilities for old_logprobs, which saves a forward. This is exact if each batch of
    rollouts is used for a single optimizer step. auto: in a run where that is so, unless something else reads
    old_logprobs: loss.kl.where=reward, router_replay.compare, or a loss_function of your own."""

    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a bonus for the policy's entropy."""

    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()

    max_completion_tokens: Positive | None = None
    """Length that `normalise: constant` divides by; by default the most tokens that the model may write after a
    prompt."""

    @model_validator(mode="after")
    def _parts_that_exclude_each_other(self) -> "PolicyLossConfig":
        if self.surrogate == "cispo" and (self.ratio == "sequence" or self.dual_clip is not None):
            raise ValueError("surrogate=cispo clips token ratios itself: use ratio=token and dual_clip=null")
        if self.clip_low > 1:
            raise ValueError(f"clip_low={self.clip_low}: a ratio is never negative, so at most 1: lower it")
        return self


class AdvantageConfig(Section):
    """Advantages: a completion's reward, compared with the rewards of other completions."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "grpo"
    """grpo: (reward - group mean) / group standard deviation (arXiv:2402.03300). dr_grpo: reward - group mean
    (arXiv:2503.20783). rloo: reward - mean of the group's other rewards (Ahmadian et al., arXiv:2402.14740). reinforce:
    (reward - group mean) / standard deviation over the batch (REINFORCE++ with baseline; Hu, arXiv:2501.03262)."""

    clip: Annotated[float, Field(gt=0)] | None = None
    """Bound of advantages, which are clipped to [-clip, clip]; null clips none."""
