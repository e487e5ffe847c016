"""Rules: the lines of the table."""

from collections.abc import Callable
from dataclasses import dataclass

from automodel_rl.support.capabilities import without
from automodel_rl.support.combination import Combination
from automodel_rl.support.features import Feature

Refusal = Callable[[Combination], str | None]
"""Gives the text that refuses a combination; None for a combination that keeps the rule."""


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    Attributes:
        feature: the feature that the rule is about.
        supported: text that says how far the feature is supported.
        refusal: refuses a combination for what no pair of features says (capabilities.py); None for nothing.
        features: the line names all that does not go with these.
    """

    feature: str
    supported: str
    refusal: Refusal | None = None
    features: tuple[Feature, ...] = ()

    def __str__(self) -> str:
        excluded = without(*self.features)
        return f"| {self.feature} | {self.supported}{f'; not with {excluded}' if excluded else ''} |"
