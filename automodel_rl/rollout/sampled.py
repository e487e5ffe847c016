"""Prompts to sample from or to score, and what is answered."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from automodel_rl.generator_messages import Sampling


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt to continue, or to score.

    Attributes:
        tokens: its tokens.
        num_samples: number of completions.
        seed: the client's seed; that of each completion is made of it and the completion's number.
        sampling: how completions are sampled.
        with_logprobs: whether to give the log-probabilities of its own tokens.
        num_top: how many of the likeliest tokens to give for each token of prompt and completions; 0 for none.
    """

    tokens: list[int]
    num_samples: int
    seed: int
    sampling: Sampling
    with_logprobs: bool = False
    num_top: int = 0


@dataclass(frozen=True)
class SampledSequence:
    """A completion: its tokens with the one that ended it, their log-probabilities, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class ScoredTokens:
    """A prompt with its completion, scored by the trained model at temperature 1. First entries are 0.

    Attributes:
        logprobs: log-probabilities of the tokens, float32 [n].
        top_logprobs, top_ids: the largest log-probabilities for each token, largest first, and their ids, [n, k].
    """

    logprobs: np.ndarray
    top_logprobs: np.ndarray
    top_ids: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """The answer to a prompt.

    Attributes:
        sequences: the completions.
        prompt_logprobs: log-probabilities of the prompt's tokens, [n], the first 0; None if not asked for.
        scored: the prompt with each completion, or alone if there is none, for a prompt with `num_top`.
    """

    sequences: list[SampledSequence] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    scored: list[ScoredTokens] = field(default_factory=list)


@dataclass(frozen=True)
class Refused:
    """The answer to a job that could not be done, on any rank; `text` says why. The state is as before."""

    text: str
