"""The critic of PPO and generalised advantage estimation."""

from typing import Annotated, Literal

from pydantic import Field

from automodel_rl.config.base import Fraction, PathText, Section
from automodel_rl.config.further_models import Between, FurtherModel
from automodel_rl.config.model import ModelConfig
from automodel_rl.config.optimizer import OptimizerConfig


class GAEConfig(Section):
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438, eq. 16) over the tokens that the model
    generated. Tokens from tools or an environment are skipped, without discount.

    Example:
        >>> GAEConfig(gae_lambda=1.0).discount
        1.0
    """

    discount: Fraction = 1.0
    """gamma: discount factor per step, for rewards and values."""

    gae_lambda: Fraction = 0.95
    """lambda: 1 uses the observed rewards only, 0 relies on the critic's next value."""

    critic_lambda: Fraction | None = None
    """lambda of the critic's training targets; 1 is usual where rewards come at the end (VAPO, arXiv:2504.05118,
    section 4.1). null: gae_lambda."""

    length_adaptive: Annotated[float, Field(gt=0)] | None = None
    """a: replaces gae_lambda for the policy by 1 - 1 / (a n), where n is the number of generated tokens of the row, or
    by 0 where a n is below 1 (VAPO, section 4.2, with a = 0.05). null: gae_lambda for all rows."""

    level: Literal["token", "turn"] = "token"
    """Step of the estimate. token: each token. turn: each turn of the model, whose tokens all get the same
    advantage."""

    whiten: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over all generated tokens of the step."""


class CriticConfig(Section):
    """The critic: a model with a linear head that estimates the value of the state before each token.

    Example:
        >>> CriticConfig(warmup_steps=10).value_clip
        0.2
    """

    path: PathText | None = None
    """Folder or hub id of the initial checkpoint, such as that of a reward model; null: model.path. A checkpoint
    without a linear head gets a randomly initialised one."""

    optimizer: OptimizerConfig = OptimizerConfig()

    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Largest change of a value relative to its value before the step; values beyond it get no gradient. null: no
    bound."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of initial steps in which only the critic is trained."""

    between: Between = "device"
    """Location of weights and optimizer moments while the critic is idle. host: in host memory, so that critic and
    policy use the GPU in turns."""

    def further_model(self, policy: ModelConfig) -> FurtherModel:
        """Returns the critic as a `FurtherModel`: `policy`, the section of the trained model, with a value head and
        without adapters, MTP or indexer training."""
        left_out = dict.fromkeys(("lora", "adapters", "mtp", "indexer"))
        own = {"path": self.path or policy.path, "num_labels": 1, **left_out}
        return FurtherModel(policy.model_copy(update=own), "critic", is_trained=True, between=self.between)
