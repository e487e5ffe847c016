"""Completions and log-probabilities of prompts under the weights that the trained model has."""

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generator_messages import Request
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.protocol import Completion
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.prompt_scores import score_prompts, score_with_top
from automodel_rl.rollout.sampled import (
    PromptScores,
    Refused,
    Sampled,
    SampledSequence,
    SamplePrompt,
    ScoredTokens,
)
from automodel_rl.rollout.seeds import mixed_seed

MOST_ATTEMPTS = 3
"""Attempts at a sample, with failed generators started again in between."""


class Sampler:
    """Samples from the weights that a policy has, and scores prompts under them.

    Args:
        policy: the model.
        fleet: its generators, which have the same weights.
    """

    def __init__(self, policy: Policy, fleet: Fleet):
        self.policy, self.fleet = policy, fleet

    def answer(self, prompts: list[SamplePrompt], show: Callable[[], None]) -> list[Sampled | Refused]:
        """The answer to each prompt. A prompt is refused by itself if one of its completions failed.

        Args:
            prompts: the prompts.
            show: gives the trained model these weights, for generators that are started again.

        Raises:
            InputError: generators fail again and again.
        """
        scores = score_prompts(self.policy, prompts)
        sequences = _complete(self.fleet, prompts, show)
        return answers_of(sequences, scores, self._ranked(prompts, sequences))

    def _ranked(
        self, prompts: list[SamplePrompt], sequences: list[list[SampledSequence] | Refused]
    ) -> dict[int, list[ScoredTokens]]:
        """Prompts with their completions, scored, of those that ask for the likeliest tokens, by their places."""
        rows: list[tuple[int, list[int]]] = []
        for place, (prompt, of_prompt) in enumerate(zip(prompts, sequences, strict=True)):
            if prompt.num_top and not isinstance(of_prompt, Refused):
                completions = [sequence.tokens for sequence in of_prompt] or [[]]
                rows += [(place, [*prompt.tokens, *tokens]) for tokens in completions]
        scored = score_with_top(self.policy, [row for _, row in rows], [prompts[place].num_top for place, _ in rows])
        found: dict[int, list[ScoredTokens]] = {}
        for (place, _), one in zip(rows, scored, strict=True):
            found.setdefault(place, []).append(one)
        return found


def _complete(
    fleet: Fleet, prompts: list[SamplePrompt], show: Callable[[], None]
) -> list[list[SampledSequence] | Refused]:
    """Completions of each prompt, with the weights that generators got last. A prompt is refused by itself if one of
    its completions failed.

    Args:
        fleet: the generators.
        prompts: the prompts.
        show: gives the trained model these weights, for generators that are started again.

    Raises:
        InputError: a generator fails again and again.
    """
    requests = [
        Request(prompt.tokens, mixed_seed(prompt.seed, number), prompt.sampling)
        for prompt in prompts
        for number in range(prompt.num_samples)
    ]
    problem = ""
    for _ in range(MOST_ATTEMPTS):
        if fleet.lost:
            problem = next(iter(fleet.lost.values()))
            print(f"warning: a generator failed ({problem}); starting it again", file=sys.stderr, flush=True)
            show()
            fleet.restart()
            if fleet.can_write:  # others write in place of those that are still lost
                fleet.give_up()
        try:
            completions = iter(fleet.write(requests))
        except RolloutError as error:
            problem = str(error)
        else:
            return [_sequences([*itertools.islice(completions, prompt.num_samples)]) for prompt in prompts]
    raise InputError(f"sampling fails again and again ({problem})")


NOT_FINITE = Refused("log-probabilities are NaN or infinite under these weights: sample from others")


def _sequences(completions: list[Completion]) -> list[SampledSequence] | Refused:
    """The completions of a prompt, or why there are none."""
    found = []
    for completion in completions:
        if completion.finish == "error":
            return Refused(f"a completion failed ({completion.error})")
        if not all(map(math.isfinite, completion.logprobs)):
            return NOT_FINITE
        found.append(SampledSequence(completion.token_ids, completion.logprobs, completion.finish))
    return found


def answers_of(
    sequences: Sequence[list[SampledSequence] | Refused],
    scores: Sequence[PromptScores],
    scored: Mapping[int, list[ScoredTokens]],
) -> list[Sampled | Refused]:
    """The answer to each prompt.

    Args:
        sequences: completions of each.
        scores: what each asks of its own tokens.
        scored: the rows of those prompts that asked for the likeliest tokens, by the prompt's place.
    """
    found: list[Sampled | Refused] = []
    for place, (of_prompt, own) in enumerate(zip(sequences, scores, strict=True)):
        rows = scored.get(place, [])
        if isinstance(of_prompt, Refused):
            found.append(of_prompt)
        elif not own.are_finite or not all(np.isfinite(row.logprobs).all() for row in rows):
            found.append(NOT_FINITE)
        else:
            found.append(Sampled(of_prompt, own, rows))
    return found
