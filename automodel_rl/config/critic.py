"""Critics: generalised advantages, and the model that estimates the values of states."""

from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import Fraction, PathText, Section
from automodel_rl.config.further_models import Between, FurtherModel
from automodel_rl.config.model import ModelConfig
from automodel_rl.config.optimizer import OptimizerConfig


class GAEConfig(Section):
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16), over the tokens that the model
    wrote: what tools or an environment say between them is passed over, without discount.

    Example:
        >>> GAEConfig(gae_lambda=1.0).discount
        1.0
    """

    discount: Fraction = 1.0
    """gamma: the factor of rewards and values one step later."""

    gae_lambda: Fraction = 0.95
    """lambda: 1 trusts the rewards that came, 0 the critic."""

    critic_lambda: Fraction | None = None
    """lambda of the returns that the critic learns; 1 is usual where rewards come at the end (VAPO, arXiv:2504.05118,
    section 4.1). null: gae_lambda."""

    length_adaptive: Annotated[float, Field(gt=0)] | None = None
    """a: the policy's lambda is 1 - 1 / (a n) for a row with n tokens that the model wrote, or 0 where a n is below 1,
    in place of gae_lambda (VAPO, section 4.2, with a = 0.05); null: the same for all rows."""

    level: Literal["token", "turn"] = "token"
    """A step of the estimate: a token, or a turn of the model, all of whose tokens then have the same advantage."""

    whiten: bool = True
    """Subtract the mean from advantages and divide by their standard deviation, over all tokens of the step that the
    model wrote."""


class CriticConfig(Section):
    """The critic: a model with a linear head that estimates the value of the state before each token.

    Example:
        >>> CriticConfig(warmup_steps=10).value_clip
        0.2
    """

    path: PathText | None = None
    """Folder or hub id of the checkpoint that it begins with, such as a reward model's; null: model.path. A checkpoint
    without a linear head gets one with random weights."""

    optimizer: OptimizerConfig = OptimizerConfig()

    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Values move at most so far from those of before the step; what lies beyond has no gradient. null: no bound."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps in which only the critic is trained."""

    between: Between = "device"
    """Place of its weights and moments while it does not compute. host: in host memory, so that critic and policy have
    the device's memory in turns."""

    def further_model(self, policy: ModelConfig) -> FurtherModel:
        """What a run asks for.

        Args:
            policy: the section of the trained model.
        """
        left_out = dict.fromkeys(("lora", "adapters", "mtp", "indexer"))
        own = {"path": self.path or policy.path, "num_labels": 1, **left_out}
        return FurtherModel(policy.model_copy(update=own), "critic", is_trained=True, between=self.between)
