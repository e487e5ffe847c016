"""Which optimizer trains the weights, its learning-rate schedule and its safeguards."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from automodel_rl.config.base import Fraction, Positive, Section

OptimizerName = Literal["adamw", "muon"]
LearningRate = Annotated[float, Field(gt=0)]


class MuonConfig(Section):
    """What Muon does with the matrices of hidden layers. The names are those of torch.optim.Muon.

    Example:
        >>> MuonConfig(momentum=0.9).adjust_lr_fn
        'match_rms_adamw'
    """

    lr: LearningRate | None = None
    """Peak learning rate of matrices; null takes optimizer.lr. It follows the same schedule."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the moving average of gradients."""

    nesterov: bool = True
    """Orthogonalise the gradient's average with the gradient once more (Nesterov), and not the average alone."""

    ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    """Newton-Schulz iterations of the orthogonalisation."""

    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """What the learning rate of a matrix of m rows and n columns is multiplied by. match_rms_adamw: 0.2 sqrt(max(m,
    n)), which makes steps as large as AdamW's, so that its rate and weight decay fit (arXiv:2502.16982). original:
    sqrt(max(1, m / n)), which needs a larger rate."""


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101) on master weights, or Muon (Jordan et
    al., kellerjordan.github.io/posts/muon) for the matrices of hidden layers and AdamW for the rest.

    Example:
        >>> OptimizerConfig(lr=3e-6, decay="constant").betas
        (0.9, 0.95)
        >>> OptimizerConfig(name="muon").muon.momentum
        0.95
    """

    name: OptimizerName = "adamw"
    """adamw: for all weights. muon: for matrices of linear layers and of experts, see `muon`; AdamW trains embeddings,
    the head, routers, norms and biases."""

    lr: LearningRate = 1e-5
    """Peak learning rate."""

    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of AdamW's moving averages of gradient and squared gradient."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of AdamW's second average."""

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

    muon: MuonConfig = MuonConfig()
    """For `name: muon` alone."""

    @model_validator(mode="after")
    def _settings_of_the_chosen_one(self) -> "OptimizerConfig":
        if self.name != "muon" and self.muon != MuonConfig():
            changed = [key for key, value in self.muon if value != MuonConfig.model_fields[key].default]
            raise ValueError(
                f"muon.{changed[0]}={getattr(self.muon, changed[0])}: {self.name} does not read it: leave it out, or "
                "set name to muon"
            )
        return self
