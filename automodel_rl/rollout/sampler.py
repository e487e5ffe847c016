"""Completions and prompt log-probabilities under the trained model's current weights."""

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

MAX_ATTEMPTS = 3
"""Attempts at a sample. Failed generators are restarted in between."""


class Sampler:
    """Samples with a policy's generators, which have the same weights, and scores prompts with the policy."""

    def __init__(self, policy: Policy, fleet: Fleet):
        self.policy, self.fleet = policy, fleet

    def answer(self, prompts: list[SamplePrompt], show: Callable[[], None]) -> list[Sampled | Refused]:
        """Answers each prompt. A prompt is refused on its own if one of its completions failed.

        Args:
            show: restores these weights in the trained model, for restarted generators.

        Raises:
            InputError: generators fail repeatedly.
        """
        scores = score_prompts(self.policy, prompts)
        sequences = _complete(self.fleet, prompts, show)
        return answers_of(sequences, scores, self._ranked(prompts, sequences))

    def _ranked(
        self, prompts: list[SamplePrompt], sequences: list[list[SampledSequence] | Refused]
    ) -> dict[int, list[ScoredTokens]]:
        """Scores prompts that have `num_top` with their completions, by index of the prompt."""
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
    """Samples completions. See `Sampler.answer`."""
    requests = [
        Request(prompt.tokens, mixed_seed(prompt.seed, number), prompt.sampling)
        for prompt in prompts
        for number in range(prompt.num_samples)
    ]
    problem = ""
    for _ in range(MAX_ATTEMPTS):
        if fleet.lost:
            problem = next(iter(fleet.lost.values()))
            print(f"warning: a generator failed ({problem}); restarting it", file=sys.stderr, flush=True)
            show()
            fleet.restart()
            if fleet.can_write:  # others take over the requests of those still lost
                fleet.postpone_restarts()
        try:
            completions = iter(fleet.write(requests))
        except RolloutError as error:
            problem = str(error)
        else:
            return [_sequences([*itertools.islice(completions, prompt.num_samples)]) for prompt in prompts]
    raise InputError(f"sampling failed repeatedly ({problem})")


NOT_FINITE = Refused("log-probabilities are NaN or infinite with these weights: sample from others")


def _sequences(completions: list[Completion]) -> list[SampledSequence] | Refused:
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
