"""Router replay: a mixture trains with the experts that its generator used."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.base import Section

ReplayStage = Literal["old_logprobs", "ref_logprobs", "train"]


class RouterReplayConfig(Section):
    """Router replay (R3, arXiv:2510.11370)."""

    enabled: bool = False
    """Send tokens to the experts that the generator chose for them. The weights of these experts still come from the
    trained router."""

    stages: tuple[ReplayStage, ...] = ("old_logprobs", "train")
    """Passes with replay. old_logprobs: the policy's log-probabilities before the optimizer steps. ref_logprobs: the
    reference's log-probabilities. train: forward and backward of the optimizer steps."""

    on_missing: Literal["live", "error"] = "error"
    """What happens if the generator does not report a token's experts. live: the router chooses. error: the completion
    counts as failed, and its group is left out."""

    compare: bool = False
    """Diagnosis: run one more pass without replay in each step, for the metric train/logprob_error_live, to compare
    with train/logprob_error."""

    @model_validator(mode="after")
    def _train(self) -> "RouterReplayConfig":
        if self.enabled and "train" not in self.stages:
            raise ValueError(
                f"stages={list(self.stages)} leave out train, and gradients would be those of other experts than the "
                "rollouts': add train, or set enabled to false"
            )
        if self.compare and not self.enabled:
            raise ValueError("compare=true has nothing to compare without enabled=true: set it, or compare to false")
        return self
