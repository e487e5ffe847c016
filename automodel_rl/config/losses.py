"""Settings of the supervised, preference and policy-gradient losses. The losses themselves take these sections."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Positive, Section


class SFTLossConfig(Section):
    """The supervised loss.

    Example:
        >>> SFTLossConfig(kind="dft").kind
        'dft'
    """

    kind: Literal["likelihood", "dft", "eaft"] = "likelihood"
    """likelihood: -log p of each trained token. dft: -sg(p) log p, where sg stops the gradient, so that tokens which
    the model finds unlikely pull less (dynamic fine-tuning; Wu et al., arXiv:2508.05629). eaft: -H^eaft_power log p,
    with H the entropy of the model's `eaft_top_k` likeliest tokens among themselves, so that tokens of which the model
    is sure pull less (entropy-adaptive fine-tuning, arXiv:2601.02151; the paper divides H by log eaft_top_k, a constant
    factor); it takes one more forward. val/loss is that of likelihood."""

    eaft_power: Annotated[float, Field(gt=0)] = 1.0
    """Power of the entropy in eaft."""

    eaft_top_k: Annotated[int, Field(ge=2)] = 20
    """Number of likeliest tokens whose entropy eaft takes; all if the vocabulary has fewer."""


Preference = Literal[
    "dpo",
    "ipo",
    "simpo",
    "orpo",
    "hinge",
    "robust",
    "exo",
    "nca",
    "bco",
    "sppo",
    "apo_zero",
    "apo_down",
    "discopop",
]
"""Names of preference losses."""

OF_MARGIN: tuple[Preference, ...] = ("dpo", "hinge", "robust", "exo", "discopop")
"""Those that depend on the difference between chosen and rejected times beta, and on nothing else."""


class DPOLossConfig(Section):
    """The preference loss. For a pair, m = l(chosen) - l(rejected), where l is a completion's log-probability minus the
    reference's.

    Example:
        >>> DPOLossConfig(variant="simpo", beta=2.0).needs_reference
        False
    """

    variant: Preference = "dpo"
    """dpo: -log sigmoid(beta m) (Rafailov et al., arXiv:2305.18290, eq. 7).
    ipo: (m - 1 / (2 beta))^2, l averaged over tokens (Azar et al., arXiv:2310.12036, eq. 17).
    simpo: -log sigmoid(beta m - gamma), l averaged over tokens, no reference (Meng et al., arXiv:2405.14734, eq. 6).
    orpo: -beta log sigmoid(log odds of chosen - log odds of rejected), odds of the mean probability of a token, no
    reference, and sft_weight 1 (Hong et al., arXiv:2403.07691, eq. 6 and 7).
    hinge: max(0, 1 - beta m) (SLiC; Zhao et al., arXiv:2305.10425).
    robust: dpo without bias for a share label_smoothing of wrong labels (Chowdhury et al., arXiv:2403.00409, eq. 12).
    exo: KL divergence of sigmoid(beta m) from the label 1 - label_smoothing (Ji et al., arXiv:2402.00856).
    nca: -log sigmoid(beta l) of chosen, and half of -log sigmoid(-beta l) of both (Chen et al., arXiv:2402.05369).
    bco: -log sigmoid of beta l of chosen and of -beta l of rejected (Jung et al., arXiv:2404.04656, without its shift).
    sppo: (l(chosen) - 1 / (2 beta))^2 + (l(rejected) + 1 / (2 beta))^2 (Wu et al., arXiv:2405.00675).
    apo_zero: 1 - sigmoid(beta l) of chosen, plus sigmoid(beta l) of rejected; apo_down: sigmoid(beta l) of chosen, plus
    1 - sigmoid(beta m) (D'Oosterlinck et al., arXiv:2408.06266).
    discopop: dpo, and exp(-beta m) in its place where m is large (Lu et al., arXiv:2406.08414)."""

    mix: dict[Preference, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Several variants with weights, in place of `variant`: their weighted losses are added up. MPO is {dpo: 0.8, bco:
    0.2} with sft_weight 1 (Wang et al., arXiv:2411.10442)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the preference. With a smaller beta the policy may move farther from the reference."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs that dpo, robust and exo assume to be labelled the wrong way round. dpo with it is the
    conservative one (Mitchell, "A note on DPO with noisy preferences")."""

    reference_free: bool = False
    """Leave the reference out: l is a completion's log-probability itself. simpo and orpo always do. dpo without it and
    with sft_weight 1 is CPO (Xu et al., arXiv:2401.08417)."""

    length_normalised: bool = False
    """Average l over tokens, in place of the sum. ipo, simpo and orpo always average."""

    excess_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of tokens beyond the length of a pair's shorter completion (LD-DPO; Liu et al., arXiv:2409.06411)."""

    divergence: Literal["reverse_kl", "forward_kl", "js"] = "reverse_kl"
    """What keeps the policy near the reference, of which the usual losses follow with reverse_kl. forward_kl: l becomes
    1 - exp(-l). js: l becomes log 2 + log sigmoid(l) (Wang et al., arXiv:2309.16240)."""

    gamma: Annotated[float, Field(ge=0)] = 0.5
    """Margin of simpo."""

    alpha: float = 0.0
    """simpo's l becomes (1 - p^-alpha) / alpha, with p = exp(l) (AlphaPO; Gupta et al., arXiv:2501.03884)."""

    tau: Annotated[float, Field(gt=0)] = 0.05
    """How sharply discopop goes over from one of its losses to the other."""

    sft_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of an added loss: the chosen completion's negative log-likelihood per token (Pang et al.,
    arXiv:2404.19733). null: 1 for orpo, else 0."""

    sft_mean: Literal["completion", "token"] = "completion"
    """How that loss is averaged. completion: over the tokens of each chosen completion, then over pairs. token: over
    all tokens of chosen completions."""

    @property
    def variants(self) -> dict[Preference, float]:
        """The variants, each with its weight."""
        return self.mix or {self.variant: 1.0}

    @property
    def needs_reference(self) -> bool:
        """Whether microbatches need `ref_logprobs`."""
        return any(self.compares_with_reference(variant) for variant in self.variants)

    def compares_with_reference(self, variant: Preference) -> bool:
        """Whether a variant's l is a difference from the reference."""
        return not self.reference_free and variant not in ("simpo", "orpo")

    def averages(self, variant: Preference) -> bool:
        """Whether a variant's l is averaged over tokens."""
        return self.length_normalised or variant in ("ipo", "simpo", "orpo")

    @property
    def weight_of_sft(self) -> float:
        """`sft_weight`, if it is null by the variants."""
        return float("orpo" in self.variants) if self.sft_weight is None else self.sft_weight

    @model_validator(mode="after")
    def _parts_that_exclude_each_other(self) -> "DPOLossConfig":
        names = [*self.variants]
        if self.mix and self.variant != "dpo":
            raise ValueError(f"variant={self.variant} and mix: mix names all variants, so leave variant out")
        smoothed = [name for name in names if name in ("dpo", "robust", "exo")]
        if self.label_smoothing and not smoothed:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} is for dpo, robust and exo, not {names[0]}: set it to 0"
            )
        if not self.label_smoothing and (sharp := [name for name in smoothed if name != "dpo"]):
            raise ValueError(f"variant={sharp[0]} needs the share of wrong labels: set label_smoothing, such as 0.1")
        if self.alpha and "simpo" not in names:
            raise ValueError(f"alpha={self.alpha} is for simpo, not {names[0]}: set it to 0")
        if self.divergence != "reverse_kl":
            if not self.needs_reference:
                raise ValueError(f"divergence={self.divergence} is from a reference, and {names[0]} has none here")
            if others := [name for name in names if name not in OF_MARGIN]:
                raise ValueError(f"divergence={self.divergence} is for {', '.join(OF_MARGIN)}, not {others[0]}")
        if self.tau != 0.05 and "discopop" not in names:
            raise ValueError(f"tau={self.tau} is for discopop, not {names[0]}: leave it out")
        if self.sft_mean == "token" and not self.weight_of_sft:
            raise ValueError("sft_mean=token averages the loss of sft_weight, which is 0: give sft_weight")
        return self


class RejectConfig(Section):
    """What is not trained, because generator and policy differ too much. With w = exp(old_logprobs - rollout_logprobs)
    and the probabilities p (policy) and g (generator) of a token:

    Example:
        >>> RejectConfig(statistic="k3", level="mean", high=0.01).low
        0.0
    """

    statistic: Literal["ratio", "k2", "k3", "tv", "binary_kl"] = "ratio"
    """ratio: w. k2: (log w)^2 / 2. k3: w - 1 - log w. tv: |p - g|. binary_kl: the divergence of p from g as of two
    coins."""

    level: Literal["token", "mean", "sum", "max"] = "token"
    """token: each token is judged by itself. Others judge a completion as a whole: by the mean of its tokens'
    statistic, their sum, or the largest. Of ratio the mean is the geometric one, and the sum is the product."""

    low: Annotated[float, Field(ge=0)] = 0.0
    """Least that is trained."""

    high: Annotated[float, Field(gt=0)]
    """Most that is trained."""

    @model_validator(mode="after")
    def _order(self) -> "RejectConfig":
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: swap them")
        return self


class CorrectionConfig(Section):
    """Correction for the difference between the generator that wrote a completion and the policy that learns from it.
    Tokens are weighted by w = exp(old_logprobs - rollout_logprobs).

    Example:
        >>> CorrectionConfig(kind="truncate").high
        2.0
    """

    kind: Literal["none", "truncate", "icepop", "sequence_mask", "product_truncate", "product_mask"] = "none"
    """none: no correction. truncate: w is clipped to [low, high] (Ionides, "Truncated importance sampling", 2008).
    icepop: tokens with w outside [low, high] get weight 0, others w (Ling team, arXiv:2510.18855). sequence_mask:
    sequences whose geometric mean of w is outside [low, high] get weight 0, tokens of others w. product_truncate: all
    tokens of a sequence get the product of their w, clipped to [low, high]. product_mask: they get the product, or 0
    where it is outside [low, high]; TRL calls this sequence_mask."""

    low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound: of w, of its geometric mean for sequence_mask, of its product for product_truncate and
    product_mask."""

    high: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the same."""

    reject: tuple[RejectConfig, ...] = ()
    """What gets weight 0, whatever the kind: what any of these rules rejects. With kind none the rest has weight 1."""

    @property
    def is_on(self) -> bool:
        """Whether tokens have weights."""
        return self.kind != "none" or bool(self.reject)

    @property
    def compares_sequences(self) -> bool:
        """Whether whole sequences lie within the bounds or outside."""
        return self.kind in ("sequence_mask", "product_truncate", "product_mask")

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


class KTOLossConfig(Section):
    """The loss of completions that are called good or bad. With s the sum over a completion's tokens of the logarithm
    of policy / reference, and z the reference point (Ethayarajh et al., arXiv:2402.01306, eq. 8): of a good one
    desirable_weight (1 - sigmoid(beta (s - z))), of a bad one undesirable_weight (1 - sigmoid(beta (z - s))).

    Example:
        >>> KTOLossConfig(desirable_weight=1.33).reference_point
        'batch'
    """

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the preference. With a smaller beta the policy may move farther from the reference."""

    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of good completions. Its number of them should be 1 to 4/3 times `undesirable_weight` times that of bad
    ones."""

    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of bad completions."""

    reference_point: Literal["batch", "zero"] = "batch"
    """z. batch: the mean over the step of s of prompts with completions of other prompts, at least 0, which takes two
    more forwards. zero: 0, which is APO-zero for completions without pairs (D'Oosterlinck et al., arXiv:2408.06266)."""


class RewardLossConfig(Section):
    """The loss of a reward model: -log sigmoid(r_chosen - r_rejected - margin), with the pair's own margin if the data
    have one (Ouyang et al., arXiv:2203.02155, eq. 1; Touvron et al., arXiv:2307.09288, eq. 2).

    Example:
        >>> RewardLossConfig(centring=0.01).centring
        0.01
    """

    centring: Annotated[float, Field(ge=0)] = 0.0
    """Weight of (r_chosen + r_rejected)^2, which holds scores around 0 (Eisenstein et al., arXiv:2312.09244, eq. 2);
    0.01 is usual."""


class PolicyLossConfig(Section):
    """The policy-gradient loss. A is a token's advantage, and q = exp(logprobs - old_logprobs). The default is PPO's
    -min(q A, clip(q) A) (Schulman et al., arXiv:1707.06347, eq. 7), as in GRPO (Shao et al., arXiv:2402.03300).

    Example:
        >>> PolicyLossConfig(clip_high=0.28, ratio="sequence").normalise
        'token'
    """

    surrogate: Literal["clip", "cispo", "sapo", "vespo", "gmpo", "dppo_tv", "dppo_kl"] = "clip"
    """Loss of a token, where sg stops the gradient. clip: PPO's -min(q A, clip(q) A).
    cispo: -A sg(clip(q)) logprobs, where clipped tokens still have a gradient (MiniMax, arXiv:2506.13585, eq. 4).
    sapo: -A 4 / t sigmoid(t (q - 1)), with t of `soft_temperatures` (arXiv:2511.20347); with normalise=sequence.
    vespo: -sg(phi(Q)) A logprobs, where Q is the product of a completion's q with a correction's weights, and
    phi(Q) = Q^k exp(l - l Q), (k, l) = (2, 3), or (3, 2) where A < 0 (VESPO, as TRL has it).
    gmpo: -A times the geometric mean of a completion's q, each clipped to exp(-clip_low) to exp(clip_high) on the side
    where A would move it on (arXiv:2507.20673); with normalise=sequence.
    dppo_tv: -A sg(min(q, 20)) logprobs, unless the token's probability is more than clip_high above the old one and
    A > 0, or more than clip_low below it and A < 0 (arXiv:2602.04879). dppo_kl: the bounds are of the divergence
    between coins with these probabilities."""

    soft_temperatures: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (1.0, 1.05)
    """Temperatures of sapo: of tokens with A > 0, and of others."""

    off_policy_bound: Annotated[float, Field(ge=0)] | None = None
    """Completions with A < 0 whose mean of rollout_logprobs - logprobs is above it are not trained, not by penalties
    either (DeepSeek-V3.2, arXiv:2512.02556); null trains all."""

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

    uncertain: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a step's tokens that rewards teach: those at which the policy's entropy is highest, over all ranks.
    Penalties count at all tokens, and so does what divides the loss (Wang et al., arXiv:2506.01939, takes 0.2)."""

    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()

    max_completion_tokens: Positive | None = None
    """Length that `normalise: constant` divides by; by default the most tokens that the model may write after a
    prompt."""

    @model_validator(mode="after")
    def _parts_that_exclude_each_other(self) -> "PolicyLossConfig":
        if self.surrogate != "clip" and (self.ratio == "sequence" or self.dual_clip is not None):
            raise ValueError(f"surrogate={self.surrogate} bounds ratios itself: use ratio=token and dual_clip=null")
        if self.surrogate in ("gmpo", "sapo") and self.normalise != "sequence":
            raise ValueError(f"surrogate={self.surrogate} is a mean over completions: set normalise=sequence")
        if self.clip_low > 1 and self.surrogate in ("clip", "cispo", "dppo_tv"):
            raise ValueError(f"clip_low={self.clip_low}: a ratio is never negative, so at most 1: lower it")
        if self.surrogate in ("sapo", "vespo") and (self.clip_low, self.clip_high) != (0.2, 0.2):
            raise ValueError(f"surrogate={self.surrogate} clips nothing: leave clip_low and clip_high out")
        if self.surrogate != "sapo" and self.soft_temperatures != (1.0, 1.05):
            raise ValueError(f"soft_temperatures are for surrogate=sapo, not {self.surrogate}: leave them out")
        correction = self.correction
        if self.surrogate == "vespo" and (correction.kind not in ("none", "truncate") or correction.reject):
            raise ValueError("surrogate=vespo multiplies a completion's weights: use correction.kind=truncate or none")
        by_token = correction.kind == "icepop" or any(rule.level == "token" for rule in correction.reject)
        if self.surrogate == "gmpo" and by_token:
            raise ValueError(
                "surrogate=gmpo averages over whole completions, and correction.kind=icepop or reject with level=token "
                "leaves out single tokens: judge completions, by sequence_mask or another level"
            )
        return self


class AdvantageConfig(Section):
    """Advantages: a completion's reward, compared with the rewards of other completions."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce", "gdpo"] = "grpo"
    """grpo: (reward - group mean) / group standard deviation (arXiv:2402.03300). dr_grpo: reward - group mean
    (arXiv:2503.20783). rloo: reward - mean of the group's other rewards (Ahmadian et al., arXiv:2402.14740). reinforce:
    (reward - group mean) / standard deviation over the batch (REINFORCE++ with baseline; Hu, arXiv:2501.03262). gdpo:
    the weighted sum over rewards of grpo's for each alone, less its mean over the batch and divided by its standard
    deviation, so that a reward of a small scale counts as much as its weight says (arXiv:2601.05242)."""

    leave_one_out: bool = False
    """Take the mean and the standard deviation of the group's other completions, with grpo and gdpo. Where these do not
    differ, the deviation divides nothing."""

    whiten: Literal["no", "tokens"] = "no"
    """tokens: subtract the mean from advantages and divide by their standard deviation, over all trained tokens of the
    step, so that long completions weigh more. With reinforce it takes the place of the deviation over completions
    (REINFORCE++), with gdpo that of mean and deviation over completions."""

    clip: Annotated[float, Field(gt=0)] | None = None
    """Bound of advantages, which are clipped to [-clip, clip]; null clips none."""

    @model_validator(mode="after")
    def _others_of_the_group(self) -> "AdvantageConfig":
        if self.leave_one_out and self.kind not in ("grpo", "gdpo"):
            raise ValueError(f"leave_one_out is for grpo and gdpo, not {self.kind}: rloo leaves one out by itself")
        return self
