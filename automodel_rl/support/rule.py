"""Rules: the rows of the table."""

from collections.abc import Callable
from dataclasses import dataclass

from automodel_rl.support.capabilities import incompatible_with
from automodel_rl.support.combination import Combination
from automodel_rl.support.features import Feature

Refusal = Callable[[Combination], str | None]
"""Returns the error message for a combination that violates a rule; otherwise None."""


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        feature: the feature in question.
        supported: extent of the support.
        refusal: check beyond the pairs of features (capabilities.py); None for none.
        features: features whose incompatibilities the row lists.
    """

    feature: str
    supported: str
    refusal: Refusal | None = None
    features: tuple[Feature, ...] = ()

    def __str__(self) -> str:
        excluded = incompatible_with(*self.features)
        return f"| {self.feature} | {self.supported}{f'; not with {excluded}' if excluded else ''} |"
