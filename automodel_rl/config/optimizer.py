"""The optimizer, its learning-rate schedule, and safeguards."""

import fnmatch
from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Fraction, Positive, Section

OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
LearningRate = Annotated[float, Field(gt=0)]


class MuonConfig(Section):
    """Settings of Muon, which trains the matrices of hidden layers. Names follow torch.optim.Muon.

    Example:
        >>> MuonConfig(momentum=0.9).adjust_lr_fn
        'match_rms_adamw'
    """

    lr: LearningRate | None = None
    """Peak learning rate of the matrices that Muon trains; null: optimizer.lr. Same schedule."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the moving average of the gradient."""

    nesterov: bool = True
    """Nesterov momentum: orthogonalise the moving average with the current gradient added once more. false: the moving
    average alone."""

    ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    """Number of Newton-Schulz iterations for orthogonalising a matrix."""

    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Learning-rate factor of a matrix with m rows and n columns. match_rms_adamw: 0.2 sqrt(max(m, n)), which matches
    the step size of AdamW, so that its learning rate and weight decay can be used (arXiv:2502.16982). original:
    sqrt(max(1, m / n)), which needs a larger learning rate."""


class ParameterGroupConfig(Section):
    """Optimizer settings for selected parameters.

    Example:
        >>> ParameterGroupConfig(names=("embed_tokens", "lm_head"), lr=1e-6).covers("model.embed_tokens.weight")
        True
    """

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of modules or parameters, such as embed_tokens, norm or layers.0.mlp, anywhere in a parameter's full name.
    Shell-style wildcards are allowed: layers.[0-3], *norm*."""

    lr: LearningRate | None = None
    """Peak learning rate; null: the optimizer's. Same schedule."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; null: the optimizer's. Biases and norm weights never decay."""

    def covers(self, parameter: str) -> bool:
        """Whether the group contains `parameter`, given by its full name."""
        return any(fnmatch.fnmatchcase(f".{parameter}.", f"*.{name}.*") for name in self.names)


class OptimizerConfig(Section):
    """The optimizer of the master weights: AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101),
    or Muon (Jordan et al., kellerjordan.github.io/posts/muon) for the matrices of hidden layers and AdamW for the rest.

    Example:
        >>> OptimizerConfig(lr=3e-6, decay="constant").betas
        (0.9, 0.95)
        >>> OptimizerConfig(name="muon").muon.momentum
        0.95
    """

    name: OptimizerName = "adamw"
    """adamw: AdamW for all weights. adamw_8bit: AdamW with 8-bit moments in blocks of 128 values of a row, except for
    norm weights and biases: 2 bytes per weight rather than 8 (arXiv:2110.02861). muon: Muon, with the keys of `muon`,
    for the matrices of linear layers and experts; AdamW for embeddings, head, routers, norms and biases."""

    lr: LearningRate = 1e-5
    """Peak learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of AdamW's moving averages of the gradient and of its square."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Constant that AdamW adds to the square root of the second moment, for numerical stability."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of matrices and embeddings. Biases and norm weights never decay."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradient clipping: maximum global norm; null: no clipping."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps over which the learning rate rises linearly from 0 to its peak."""

    warmup_ratio: Fraction | None = None
    """Length of the warm-up as a fraction of all optimizer steps, in place of `warmup_steps`."""

    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay after the warm-up. The learning rate would reach `min_lr_ratio` one step after the last."""

    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a fraction of the peak."""

    max_skipped_steps: Positive = 10
    """Number of consecutive skipped optimizer steps after which the run stops. A step is skipped if its loss or
    gradient is not finite."""

    muon: MuonConfig = MuonConfig()
    """Settings of Muon; requires `name: muon`."""

    groups: tuple[ParameterGroupConfig, ...] = ()
    """Parameters with their own learning rate or weight decay, e.g. {names: [embed_tokens, lm_head], lr: 1e-6}. A
    parameter belongs to the first group that matches it."""

    def of_parameter(self, name: str, peak: float) -> tuple[float, float]:
        """Returns the factor on the schedule's learning rate, and the weight decay, of the parameter with the full name
        `name`. `peak` is the peak learning rate of parameters outside all groups."""
        group = next((group for group in self.groups if group.covers(name)), None)
        lr = peak if group is None or group.lr is None else group.lr
        decay = self.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        return lr / self.lr, decay

    @model_validator(mode="after")
    def _one_warmup(self) -> "OptimizerConfig":
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError("set at most one of warmup_steps and warmup_ratio")
        return self

    @model_validator(mode="after")
    def _settings_of_the_chosen_one(self) -> "OptimizerConfig":
        if self.name != "muon" and self.muon != MuonConfig():
            changed = [key for key, value in self.muon if value != MuonConfig.model_fields[key].default]
            raise ValueError(
                f"muon.{changed[0]}={getattr(self.muon, changed[0])}: {self.name} does not use it: remove it, or set "
                "name to muon"
            )
        return self
