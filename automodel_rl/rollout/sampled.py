"""Prompts to sample from or to score, and what is answered."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from automodel_rl.generator_messages import Sampling


@dataclass(frozen=True, eq=False)
class PromptScoring:
    """What is asked of a prompt's own tokens under the trained model, at temperature 1.

    Attributes:
        with_logprobs: whether to give their log-probabilities.
        num_top: how many of the likeliest tokens to give for each; 0 for none.
        ids: tokens to give the log-probabilities of in the place of each token but the first, int64 [n - 1, K], -1 for
            none; None if there are no such.
        first: the first token that is scored. Nothing predicts token 0.
    """

    with_logprobs: bool = False
    num_top: int = 0
    ids: np.ndarray | None = None
    first: int = 1

    @property
    def is_anything(self) -> bool:
        """Whether anything is asked."""
        return self.with_logprobs or self.num_top > 0 or self.ids is not None


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt to continue, or to score.

    Attributes:
        tokens: its tokens.
        num_samples: number of completions.
        seed: the client's seed; that of each completion is made of it and the completion's number.
        sampling: how completions are sampled.
        scoring: what is asked of its own tokens.
        num_top: how many of the likeliest tokens to give for each token of prompt and completions; 0 for none.
    """

    tokens: list[int]
    num_samples: int
    seed: int
    sampling: Sampling
    scoring: PromptScoring = PromptScoring()
    num_top: int = 0


@dataclass(frozen=True)
class SampledSequence:
    """A completion: its tokens with the one that ended it, their log-probabilities, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class ScoredTokens:
    """A prompt, perhaps with its completion, scored by the trained model at temperature 1. First entries are 0.

    Attributes:
        logprobs: log-probabilities of the tokens, float32 [n].
        top_logprobs, top_ids: the largest log-probabilities for each token, largest first, and their ids, [n, k].
    """

    logprobs: np.ndarray
    top_logprobs: np.ndarray
    top_ids: np.ndarray


@dataclass(frozen=True)
class PromptScores:
    """What a `PromptScoring` asks for; None for what it does not.

    Attributes:
        logprobs: log-probabilities of the prompt's tokens, float32 [n], the first 0.
        top: those of the likeliest tokens.
        at: those of the tokens that were named, float32 [n - 1, K]; 0 where there is none.
    """

    logprobs: np.ndarray | None = None
    top: ScoredTokens | None = None
    at: np.ndarray | None = None

    @property
    def are_finite(self) -> bool:
        """Whether all are numbers."""
        arrays = (self.logprobs, None if self.top is None else self.top.top_logprobs, self.at)
        return all(np.isfinite(array).all() for array in arrays if array is not None)


@dataclass(frozen=True)
class Sampled:
    """The answer to a prompt.

    Attributes:
        sequences: the completions.
        prompt: what was asked of the prompt's own tokens.
        scored: the prompt with each completion, or alone if there is none, for a prompt with `num_top`.
    """

    sequences: list[SampledSequence] = field(default_factory=list)
    prompt: PromptScores = PromptScores()
    scored: list[ScoredTokens] = field(default_factory=list)


@dataclass(frozen=True)
class Refused:
    """The answer to a job that could not be done, on any rank; `text` says why. The state is as before."""

    text: str
