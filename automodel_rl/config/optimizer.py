"""The optimizer, its learning-rate schedule, and its safeguards."""

import fnmatch
from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Fraction, Positive, Section

OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
LearningRate = Annotated[float, Field(gt=0)]


class MuonConfig(Section):
    """Settings of Muon, which trains the matrices of hidden layers. The names are those of torch.optim.Muon.

    Example:
        >>> MuonConfig(momentum=0.9).adjust_lr_fn
        'match_rms_adamw'
    """

    lr: LearningRate | None = None
    """Peak learning rate of the matrices that Muon trains; null takes optimizer.lr. The schedule is the same."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the moving average of the gradient."""

    nesterov: bool = True
    """Orthogonalise the moving average with the gradient added once more (Nesterov). false: the moving average
    alone."""

    ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    """Number of Newton-Schulz iterations that orthogonalise a matrix."""

    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate of a matrix with m rows and n columns. match_rms_adamw: 0.2 sqrt(max(m, n)), which
    makes steps as large as AdamW's, so AdamW's learning rate and weight decay fit (arXiv:2502.16982). original:
    sqrt(max(1, m / n)), which needs a larger learning rate."""


class ParameterGroupConfig(Section):
    """Settings of some parameters, which override the settings of the optimizer.

    Example:
        >>> ParameterGroupConfig(names=("embed_tokens", "lm_head"), lr=1e-6).covers("model.embed_tokens.weight")
        True
    """

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of modules or parameters, such as embed_tokens, norm or layers.0.mlp, anywhere in a parameter's full name.
    * stands for anything: layers.[0-3], *norm*."""

    lr: LearningRate | None = None
    """Peak learning rate; null takes that of the optimizer. The schedule is the same."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; null takes that of the optimizer. Biases and norm weights never decay."""

    def covers(self, parameter: str) -> bool:
        """Whether a parameter belongs to the group, by its full name."""
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
    """adamw: AdamW trains all weights. adamw_8bit: likewise, with the two moments of all but norm weights and biases in
    8 bits, in blocks of 128 values of a row: 2 bytes a weight in place of 8 (arXiv:2110.02861). muon: Muon trains the
    matrices of linear layers and of experts, with the keys of `muon`; AdamW trains embeddings, the head, routers, norms
    and biases."""

    lr: LearningRate = 1e-5
    """Peak learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of AdamW's moving averages of the gradient and of the squared gradient."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Number that AdamW adds to the root of the second moving average."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of matrices and embeddings. Biases and norm weights never decay."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradient. A larger gradient is scaled down to it; null scales none."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps in which the learning rate rises linearly from 0 to its peak."""

    warmup_ratio: Fraction | None = None
    """The warm-up as a share of all optimizer steps, in place of `warmup_steps`."""

    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after the warm-up. It falls so that it would reach `min_lr_ratio` one step after the
    last."""

    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak."""

    max_skipped_steps: Positive = 10
    """Number of skipped optimizer steps in a row after which the run stops. A step is skipped if its loss or gradient
    is not finite."""

    muon: MuonConfig = MuonConfig()
    """Settings of Muon, only for `name: muon`."""

    groups: tuple[ParameterGroupConfig, ...] = ()
    """Parameters with a learning rate or weight decay of their own, e.g. {names: [embed_tokens, lm_head], lr: 1e-6}. A
    parameter belongs to the first group that names it."""

    def of_parameter(self, name: str, peak: float) -> tuple[float, float]:
        """The factor of the schedule's learning rate, and the weight decay, of a parameter.

        Args:
            name: its full name.
            peak: the peak learning rate of parameters that no group names.
        """
        group = next((group for group in self.groups if group.covers(name)), None)
        lr = peak if group is None or group.lr is None else group.lr
        decay = self.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        return lr / self.lr, decay

    @model_validator(mode="after")
    def _one_warmup(self) -> "OptimizerConfig":
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError("give at most one of warmup_steps and warmup_ratio")
        return self

    @model_validator(mode="after")
    def _settings_of_the_chosen_one(self) -> "OptimizerConfig":
        if self.name != "muon" and self.muon != MuonConfig():
            changed = [key for key, value in self.muon if value != MuonConfig.model_fields[key].default]
            raise ValueError(
                f"muon.{changed[0]}={getattr(self.muon, changed[0])}: {self.name} does not read it: leave it out, or "
                "set name to muon"
            )
        return self
