"""Prompts to sample from or to score, and their answers."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from automodel_rl.generator_messages import Sampling


@dataclass(frozen=True, eq=False)
class PromptScoring:
    """Requested scores of a prompt's own tokens under the trained model, at temperature 1.

    Attributes:
        num_top: number of likeliest tokens per position.
        ids: alternatives to each token but the first, int64 [n - 1, K], -1 for none.
        first: first token to score. Token 0 has no prediction.
    """

    with_logprobs: bool = False
    num_top: int = 0
    ids: np.ndarray | None = None
    first: int = 1

    @property
    def is_anything(self) -> bool:
        return self.with_logprobs or self.num_top > 0 or self.ids is not None


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt to continue, or to score.

    Attributes:
        seed: the client's; each completion's is derived from it and the completion's number.
        num_top: number of likeliest tokens per position of prompt and completions.
    """

    tokens: list[int]
    num_samples: int
    seed: int
    sampling: Sampling
    scoring: PromptScoring = PromptScoring()
    num_top: int = 0


@dataclass(frozen=True)
class SampledSequence:
    """A completion, including the token that ended it."""

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class ScoredTokens:
    """A prompt, with or without a completion, scored by the trained model at temperature 1. First entries are 0.

    Attributes:
        logprobs: of the tokens, float32 [n].
        top_logprobs, top_ids: the largest log-probabilities at each position, in descending order, and their ids,
            [n, k].
    """

    logprobs: np.ndarray
    top_logprobs: np.ndarray
    top_ids: np.ndarray


@dataclass(frozen=True)
class PromptScores:
    """Scores that a `PromptScoring` requests; None for others.

    Attributes:
        logprobs: of the prompt's tokens, float32 [n], the first 0.
        top: the likeliest tokens.
        at: log-probabilities of the requested `ids`, float32 [n - 1, K]; 0 where there is none.
    """

    logprobs: np.ndarray | None = None
    top: ScoredTokens | None = None
    at: np.ndarray | None = None

    @property
    def are_finite(self) -> bool:
        arrays = (self.logprobs, None if self.top is None else self.top.top_logprobs, self.at)
        return all(np.isfinite(array).all() for array in arrays if array is not None)


@dataclass(frozen=True)
class Sampled:
    """Answer to a prompt.

    Attributes:
        prompt: scores of the prompt's own tokens.
        scored: for a prompt with `num_top`: the prompt with each completion, or alone if there is none.
    """

    sequences: list[SampledSequence] = field(default_factory=list)
    prompt: PromptScores = PromptScores()
    scored: list[ScoredTokens] = field(default_factory=list)


@dataclass(frozen=True)
class Refused:
    """Answer to a request that failed on any rank. It has no effect on the state."""

    text: str
