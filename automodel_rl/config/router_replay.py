"""Whether a mixture trains on the experts that its rollouts used."""

from typing import Literal

from pydantic import model_validator

from automodel_rl.config.base import Section

ReplayStage = Literal["old_logprobs", "ref_logprobs", "train"]


class RouterReplayConfig(Section):
    """Router replay (R3, arXiv:2510.11370)."""

    enabled: bool = False
    """Tokens go to the experts that the generator sent them to; their weights are still the router's."""

    stages: tuple[ReplayStage, ...] = ("old_logprobs", "train")
    """In which passes: log-probabilities before the optimizer steps, those of the reference, and the optimizer steps
    themselves."""

    on_missing: Literal["live", "error"] = "error"
    """Where the generator does not say which experts a token went to: live lets the router choose, with error the
    completion counts as failed, and its group is left out."""

    compare: bool = False
    """Diagnosis: one more pass a step without replay, for train/logprob_error_live next to train/logprob_error."""

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
