"""Settings of the supervised, preference and policy-gradient losses, which the loss functions take as arguments."""

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
    """likelihood: -log p of each trained token. dft: -sg(p) log p, where sg stops the gradient, so that unlikely tokens
    get smaller gradients (dynamic fine-tuning; Wu et al., arXiv:2508.05629). eaft: -H^eaft_power log p, where H is the
    entropy over the model's `eaft_top_k` most likely tokens, renormalised, so that tokens of which the model is certain
    get smaller gradients (entropy-adaptive fine-tuning, arXiv:2601.02151, without the paper's constant factor 1 / log
    eaft_top_k); costs one more forward. val/loss is always that of likelihood."""

    eaft_power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of the entropy in eaft."""

    eaft_top_k: Annotated[int, Field(ge=2)] = 20
    """Number of most likely tokens over which eaft computes the entropy, at most the vocabulary size."""


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

MARGIN_PREFERENCES: tuple[Preference, ...] = ("dpo", "hinge", "robust", "exo", "discopop")
"""Losses that depend on beta m alone, the scaled difference between chosen and rejected."""


class DPOLossConfig(Section):
    """The preference loss. For a pair, m = l(chosen) - l(rejected), where l is a completion's log-probability minus
    that of the reference.

    Example:
        >>> DPOLossConfig(variant="simpo", beta=2.0).needs_reference
        False
    """

    variant: Preference = "dpo"
    """dpo: -log sigmoid(beta m) (Rafailov et al., arXiv:2305.18290, eq. 7).
    ipo: (m - 1 / (2 beta))^2, l averaged over tokens (Azar et al., arXiv:2310.12036, eq. 17).
    simpo: -log sigmoid(beta m - gamma), l averaged over tokens, no reference (Meng et al., arXiv:2405.14734, eq. 6).
    orpo: -beta log sigmoid(log odds of chosen - log odds of rejected), odds of the mean token probability, no
    reference, and sft_weight 1 (Hong et al., arXiv:2403.07691, eq. 6 and 7).
    hinge: max(0, 1 - beta m) (SLiC; Zhao et al., arXiv:2305.10425).
    robust: dpo, unbiased if a fraction label_smoothing of labels is wrong (Chowdhury et al., arXiv:2403.00409, eq. 12).
    exo: KL divergence of sigmoid(beta m) from the label 1 - label_smoothing (Ji et al., arXiv:2402.00856).
    nca: -log sigmoid(beta l) of chosen, plus half of -log sigmoid(-beta l) of both (Chen et al., arXiv:2402.05369).
    bco: -log sigmoid of beta l of chosen and of -beta l of rejected (Jung et al., arXiv:2404.04656, without its shift).
    sppo: (l(chosen) - 1 / (2 beta))^2 + (l(rejected) + 1 / (2 beta))^2 (Wu et al., arXiv:2405.00675).
    apo_zero: 1 - sigmoid(beta l) of chosen, plus sigmoid(beta l) of rejected; apo_down: sigmoid(beta l) of chosen, plus
    1 - sigmoid(beta m) (D'Oosterlinck et al., arXiv:2408.06266).
    discopop: dpo, blended into exp(-beta m) where m is large (Lu et al., arXiv:2406.08414)."""

    mix: dict[Preference, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Weights of several variants, in place of `variant`; the loss is their weighted sum. MPO is {dpo: 0.8, bco: 0.2}
    with sft_weight 1 (Wang et al., arXiv:2411.10442)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the regularisation towards the reference: with a smaller beta the policy may move farther from it."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of wrongly labelled pairs, for dpo, robust and exo. With dpo this is conservative DPO (Mitchell,
    "A note on DPO with noisy preferences")."""

    reference_free: bool = False
    """Ignore the reference: l is the completion's log-probability alone, as always in simpo and orpo. dpo with this and
    sft_weight 1 is CPO (Xu et al., arXiv:2401.08417)."""

    length_normalised: bool = False
    """Average l over tokens rather than summing it. ipo, simpo and orpo always average."""

    excess_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of tokens beyond the length of a pair's shorter completion (LD-DPO; Liu et al., arXiv:2409.06411)."""

    divergence: Literal["reverse_kl", "forward_kl", "js"] = "reverse_kl"
    """Divergence that regularises towards the reference. reverse_kl: the usual losses. forward_kl: l becomes 1 -
    exp(-l). js: l becomes log 2 + log sigmoid(l) (Wang et al., arXiv:2309.16240)."""

    gamma: Annotated[float, Field(ge=0)] = 0.5
    """Target margin of simpo."""

    alpha: float = 0.0
    """Replaces simpo's l by (1 - p^-alpha) / alpha, with p = exp(l) (AlphaPO; Gupta et al., arXiv:2501.03884). 0 is
    plain simpo."""

    tau: Annotated[float, Field(gt=0)] = 0.05
    """Temperature of discopop's transition between its two losses; smaller is sharper."""

    sft_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of an additional loss, the chosen completion's negative log-likelihood per token (Pang et al.,
    arXiv:2404.19733). null: 1 for orpo, else 0."""

    sft_mean: Literal["completion", "token"] = "completion"
    """Averaging of that loss. completion: over the tokens of each chosen completion, then over pairs. token: over all
    tokens of chosen completions."""

    @property
    def variants(self) -> dict[Preference, float]:
        """The variants and their weights."""
        return self.mix or {self.variant: 1.0}

    @property
    def needs_reference(self) -> bool:
        """Whether microbatches need `ref_logprobs`."""
        return any(self.compares_with_reference(variant) for variant in self.variants)

    def compares_with_reference(self, variant: Preference) -> bool:
        """Whether the l of `variant` is relative to the reference."""
        return not self.reference_free and variant not in ("simpo", "orpo")

    def averages(self, variant: Preference) -> bool:
        """Whether the l of `variant` is averaged over tokens."""
        return self.length_normalised or variant in ("ipo", "simpo", "orpo")

    @property
    def weight_of_sft(self) -> float:
        """`sft_weight` with its default resolved."""
        return float("orpo" in self.variants) if self.sft_weight is None else self.sft_weight

    @model_validator(mode="after")
    def _parts_that_exclude_each_other(self) -> "DPOLossConfig":
        names = [*self.variants]
        if self.mix and self.variant != "dpo":
            raise ValueError(f"variant={self.variant} and mix: mix names all variants: remove variant")
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
                raise ValueError(
                    f"divergence={self.divergence} is measured from a reference, but {names[0]} has none here"
                )
            if others := [name for name in names if name not in MARGIN_PREFERENCES]:
                raise ValueError(
                    f"divergence={self.divergence} is for {', '.join(MARGIN_PREFERENCES)}, not {others[0]}"
                )
        if self.tau != 0.05 and "discopop" not in names:
            raise ValueError(f"tau={self.tau} is for discopop, not {names[0]}: remove it")
        if self.sft_mean == "token" and not self.weight_of_sft:
            raise ValueError("sft_mean=token averages the loss of sft_weight, which is 0: set sft_weight")
        return self


class RejectConfig(Section):
    """A rule that excludes tokens or completions from training because generator and policy differ too much. Below, w =
    exp(old_logprobs - rollout_logprobs), and p and g are a token's probabilities under policy and generator.

    Example:
        >>> RejectConfig(statistic="k3", level="mean", high=0.01).low
        0.0
    """

    statistic: Literal["ratio", "k2", "k3", "tv", "binary_kl"] = "ratio"
    """ratio: w. k2: (log w)^2 / 2. k3: w - 1 - log w. tv: |p - g|. binary_kl: KL(g || p) between Bernoulli
    distributions."""

    level: Literal["token", "mean", "sum", "max"] = "token"
    """token: judge each token. Others judge a whole completion by the mean, sum or maximum of its tokens' statistic;
    for ratio, the geometric mean and the product take the place of mean and sum."""

    low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the statistic of what is trained."""

    high: Annotated[float, Field(gt=0)]
    """Upper bound of the statistic of what is trained."""

    @model_validator(mode="after")
    def _order(self) -> "RejectConfig":
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: swap them")
        return self


class CorrectionConfig(Section):
    """Importance weights that correct for the difference between the generator of a completion and the policy trained
    on it. A token's weight derives from w = exp(old_logprobs - rollout_logprobs).

    Example:
        >>> CorrectionConfig(kind="truncate").high
        2.0
    """

    kind: Literal["none", "truncate", "icepop", "sequence_mask", "product_truncate", "product_mask"] = "none"
    """none: no correction. truncate: w clipped to [low, high] (Ionides, "Truncated importance sampling", 2008). icepop:
    w, or 0 outside [low, high] (Ling team, arXiv:2510.18855). sequence_mask: w, or 0 for all tokens of a sequence whose
    geometric mean of w is outside [low, high]. product_truncate: the product of a sequence's w, clipped to [low, high],
    for all its tokens. product_mask: this product, or 0 outside [low, high]; TRL calls this sequence_mask."""

    low: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of w, of its geometric mean for sequence_mask, or of its product for product_truncate and
    product_mask."""

    high: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the same quantity."""

    reject: tuple[RejectConfig, ...] = ()
    """Rules that set weights to 0, with any kind: what one of them rejects is not trained. With kind none all other
    weights are 1."""

    @property
    def is_on(self) -> bool:
        """Whether tokens have weights."""
        return self.kind != "none" or bool(self.reject)

    @property
    def compares_sequences(self) -> bool:
        """Whether the bounds apply to whole sequences."""
        return self.kind in ("sequence_mask", "product_truncate", "product_mask")

    @model_validator(mode="after")
    def _order(self) -> "CorrectionConfig":
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: swap them")
        return self


class KLConfig(Section):
    """Penalty on the KL divergence from the reference policy. r = ref_logprobs - logprobs (Schulman, "Approximating KL
    divergence").

    Example:
        >>> KLConfig(coefficient=0.001).estimator
        'k3'
    """

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the penalty. 0: no penalty, and no reference is kept in memory."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence. k1: -r, unbiased. k2: r^2 / 2, biased, with low variance. k3: exp(r) - 1 - r,
    unbiased and never negative."""

    where: Literal["loss", "reward"] = "loss"
    """loss: add the penalty to the loss of every token. reward: sum it over a completion and subtract it from the
    reward."""


class KTOLossConfig(Section):
    """The loss of completions labelled good or bad. s is the sum over a completion's tokens of log(policy / reference),
    z the reference point. The loss of a good completion is desirable_weight (1 - sigmoid(beta (s - z))), that of a bad
    one undesirable_weight (1 - sigmoid(beta (z - s))) (Ethayarajh et al., arXiv:2402.01306, eq. 8).

    Example:
        >>> KTOLossConfig(desirable_weight=1.33).reference_point
        'batch'
    """

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength of the regularisation towards the reference: with a smaller beta the policy may move farther from it."""

    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of good completions. Multiplied by their number, it should be 1 to 4/3 times the same product for bad
    ones."""

    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of bad completions."""

    reference_point: Literal["batch", "zero"] = "batch"
    """z. batch: mean over the step of s for prompts paired with completions of other prompts, clamped to at least 0;
    costs two more forwards. zero: 0, which is APO-zero for unpaired completions (D'Oosterlinck et al.,
    arXiv:2408.06266)."""


class RewardLossConfig(Section):
    """The loss of a reward model: -log sigmoid(r_chosen - r_rejected - margin), with the pair's margin if the data have
    one (Ouyang et al., arXiv:2203.02155, eq. 1; Touvron et al., arXiv:2307.09288, eq. 2).

    Example:
        >>> RewardLossConfig(centring=0.01).centring
        0.01
    """

    centring: Annotated[float, Field(ge=0)] = 0.0
    """Weight of (r_chosen + r_rejected)^2, which keeps scores centred at 0 (Eisenstein et al., arXiv:2312.09244, eq.
    2); 0.01 is usual, 0 is off."""


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
    sapo: -A 4 / t sigmoid(t (q - 1)), with t from `soft_temperatures` (arXiv:2511.20347); needs normalise=sequence.
    vespo: -sg(phi(Q)) A logprobs, where Q is the product over a completion of q and the correction weights, phi(Q) =
    Q^k exp(l - l Q), and (k, l) = (2, 3), or (3, 2) where A < 0 (VESPO, as in TRL).
    gmpo: -A times the geometric mean of a completion's q, each clipped to [exp(-clip_low), exp(clip_high)] on the side
    towards which A pushes it (arXiv:2507.20673); needs normalise=sequence.
    dppo_tv: -A sg(min(q, 20)) logprobs, but 0 if A > 0 and the token's probability is more than clip_high above the old
    one, or A < 0 and it is more than clip_low below (arXiv:2602.04879). dppo_kl: the bounds apply to KL(old || new)
    between Bernoulli distributions with these probabilities."""

    soft_temperatures: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (1.0, 1.05)
    """Temperatures of sapo: for tokens with A > 0, and for others."""

    off_policy_bound: Annotated[float, Field(ge=0)] | None = None
    """Completions with A < 0 whose mean of rollout_logprobs - logprobs exceeds this bound are excluded from the loss,
    penalties included (DeepSeek-V3.2, arXiv:2512.02556); null: no bound."""

    ratio: Literal["token", "sequence"] = "token"
    """token: every token has its own q. sequence: all tokens of a completion (of a row, in an agent's episode) share
    the geometric mean of their q, with a separate gradient each, which a correction weights separately (GSPO-token;
    Zheng et al., arXiv:2507.18071, eq. 14). Without a correction the gradient is that of GSPO, eq. 5."""

    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """Lower clipping range: q is clipped at 1 - clip_low."""

    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper clipping range: q is clipped at 1 + clip_high. Values above clip_low encourage exploration (DAPO,
    arXiv:2503.14476)."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of tokens with A < 0 by -dual_clip A (Ye et al., arXiv:1912.09729, eq. 5); null: no bound."""

    normalise: Literal["token", "sequence", "constant"] = "token"
    """How token losses are averaged. token: mean over all tokens (DAPO). sequence: mean over each completion's tokens,
    then over completions (GRPO). constant: sum over each completion's tokens divided by the maximum completion length,
    then mean over completions (Dr. GRPO; Liu et al., arXiv:2503.20783). All rows of an agent's episode together count
    as one completion."""

    on_policy: Literal["auto"] | bool = "auto"
    """Use the current log-probabilities as old_logprobs, which saves a forward. Exact if each batch of rollouts is used
    for a single optimizer step. auto: only where it is exact and nothing else reads old_logprobs: loss.kl.where=reward,
    router_replay.compare, or a custom loss_function."""

    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""

    uncertain: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of a step's tokens with a policy gradient: those at which the policy's entropy is highest, over all
    ranks. Penalties and the normalisation still count all tokens (Wang et al., arXiv:2506.01939, uses 0.2)."""

    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()

    max_completion_tokens: Positive | None = None
    """Divisor of `normalise: constant`. Defaults to the maximum number of tokens that the model may generate after a
    prompt."""

    @model_validator(mode="after")
    def _parts_that_exclude_each_other(self) -> "PolicyLossConfig":
        if self.surrogate != "clip" and (self.ratio == "sequence" or self.dual_clip is not None):
            raise ValueError(f"surrogate={self.surrogate} bounds ratios itself: use ratio=token and dual_clip=null")
        if self.surrogate in ("gmpo", "sapo") and self.normalise != "sequence":
            raise ValueError(f"surrogate={self.surrogate} is a mean over completions: set normalise=sequence")
        if self.clip_low > 1 and self.surrogate in ("clip", "cispo", "dppo_tv"):
            raise ValueError(f"clip_low={self.clip_low}: ratios are never negative, so it must be at most 1: lower it")
        if self.surrogate in ("sapo", "vespo") and (self.clip_low, self.clip_high) != (0.2, 0.2):
            raise ValueError(f"surrogate={self.surrogate} does not clip: remove clip_low and clip_high")
        if self.surrogate != "sapo" and self.soft_temperatures != (1.0, 1.05):
            raise ValueError(f"soft_temperatures are for surrogate=sapo, not {self.surrogate}: remove them")
        correction = self.correction
        if self.surrogate == "vespo" and (correction.kind not in ("none", "truncate") or correction.reject):
            raise ValueError("surrogate=vespo multiplies a completion's weights: use correction.kind=truncate or none")
        by_token = correction.kind == "icepop" or any(rule.level == "token" for rule in correction.reject)
        if self.surrogate == "gmpo" and by_token:
            raise ValueError(
                "surrogate=gmpo averages over whole completions, but correction.kind=icepop or reject with level=token "
                "masks single tokens: use sequence_mask or another level"
            )
        return self


class AdvantageConfig(Section):
    """Advantages of completions, from comparing rewards within a group."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce", "gdpo"] = "grpo"
    """grpo: (reward - group mean) / group standard deviation (arXiv:2402.03300). dr_grpo: reward - group mean
    (arXiv:2503.20783). rloo: reward - mean of the group's other rewards (Ahmadian et al., arXiv:2402.14740). reinforce:
    (reward - group mean) / standard deviation over the batch (REINFORCE++ with baseline; Hu, arXiv:2501.03262). gdpo:
    grpo for each reward separately, then their weighted sum, normalised to mean 0 and standard deviation 1 over the
    batch, so that the scale of a reward does not matter (arXiv:2601.05242)."""

    leave_one_out: bool = False
    """Compute mean and standard deviation over the group's other completions, with grpo and gdpo. If their rewards are
    all equal, the difference is not divided."""

    whiten: Literal["no", "tokens"] = "no"
    """tokens: normalise advantages to mean 0 and standard deviation 1 over all trained tokens of the step, so that long
    completions count more. Replaces the normalisation over completions of reinforce (giving REINFORCE++) and gdpo."""

    clip: Annotated[float, Field(gt=0)] | None = None
    """Clips advantages to [-clip, clip]; null: no clipping."""

    @model_validator(mode="after")
    def _others_of_the_group(self) -> "AdvantageConfig":
        if self.leave_one_out and self.kind not in ("grpo", "gdpo"):
            raise ValueError(f"leave_one_out is for grpo and gdpo, not {self.kind}: rloo leaves one out by itself")
        return self
