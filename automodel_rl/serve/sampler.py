"""Completions and log-probabilities of prompts under the weights that the trained model has."""

import itertools
import math
import sys
from collections.abc import Callable

import torch

from automodel_rl.batch import Batch, TokenSequence
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generator_messages import Request
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.protocol import Completion
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.seeds import mixed_seed
from automodel_rl.serve.messages import Refused, Sampled, SampledSequence, SamplePrompt

MOST_ATTEMPTS = 3
"""Attempts at a sample, with failed generators started again in between."""


def complete(
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


def score(policy: Policy, prompts: list[SamplePrompt]) -> list[torch.Tensor]:
    """Log-probabilities of the tokens of each prompt, fp32 [n], the first 0, by the trained model."""
    rows = Batch(
        TokenSequence(torch.tensor(prompt.tokens), torch.ones(len(prompt.tokens), dtype=torch.bool))
        for prompt in prompts
    )
    return [logprobs.float() for logprobs in policy.logprobs(rows)]


def answers(
    sequences: list[list[SampledSequence] | Refused], logprobs: dict[int, torch.Tensor]
) -> list[Sampled | Refused]:
    """The answer to each prompt.

    Args:
        sequences: completions of each.
        logprobs: log-probabilities of the tokens of those prompts that asked for them, by the prompt's place.
    """
    found: list[Sampled | Refused] = []
    for place, of_prompt in enumerate(sequences):
        own = logprobs.get(place)
        if isinstance(of_prompt, Refused):
            found.append(of_prompt)
        elif own is not None and not own.isfinite().all():
            found.append(NOT_FINITE)
        else:
            found.append(Sampled(of_prompt, None if own is None else own.numpy()))
    return found


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
