"""Completions and log-probabilities of prompts under the weights that the trained model has."""

import datetime
import itertools
import math
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence, pack
from automodel_rl.config import ServeConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import InputError, WeightSyncError, innermost
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.parallel.host_collectives import gather_objects, interleave
from automodel_rl.rollout.seeds import mixed_seed
from automodel_rl.serve.adapter_scale import AdapterScale
from automodel_rl.serve.messages import Prompt, Refused, Sampled, SampledSequence

PATIENCE = datetime.timedelta(hours=1)
"""Longest time that ranks wait for a rank that is still sampling. A rank that dies is noticed at once."""

MOST_ATTEMPTS = 3
"""Attempts at a sample, with failed generators started again in between."""


class Sampler:
    """Samples with a generator next to each rank, and scores with the trained model. Methods are collectives.

    Args:
        config: the service's config.
        engine: trains the model.
        tokenizer: the model's tokenizer, for stop texts.

    Raises:
        InputError: a generator does not start.
    """

    def __init__(self, config: ServeConfig, engine: Engine, tokenizer: PreTrainedTokenizerBase):
        self.config, self.engine, self.handle = config, engine, engine.handle
        self._scale = AdapterScale()
        self.supervisor = GeneratorSupervisor(config.generator_spec, engine, tokenizer, self._scale.prepare, PATIENCE)
        self.world = self.supervisor.world

    def take_weights(self, scale: float) -> None:
        """Gives the generators the adapters, or all weights, that the trained model has.

        Args:
            scale: the factor of the adapters' output.
        """
        self._scale.set(scale)
        self.supervisor.load_weights()

    def complete(self, prompts: list[Prompt], show: Callable[[], None]) -> list[list[SampledSequence] | Refused]:
        """Completions of each prompt, with the weights that generators got last. A prompt is refused by itself if one
        of its completions failed.

        Args:
            prompts: the prompts, the same on every rank.
            show: gives the trained model these weights, for generators that are started again.

        Raises:
            InputError: on all ranks; a generator fails again and again.
        """
        requests = [
            Request(prompt.tokens, mixed_seed(prompt.seed, number), prompt.sampling)
            for prompt in prompts
            for number in range(prompt.num_samples)
        ]
        for _ in range(MOST_ATTEMPTS):
            mine = self._write(requests[dist.get_rank() :: dist.get_world_size()])
            problems = [problem for problem in gather_objects(self.supervisor.problem, self.world) if problem]
            if not problems:
                completions = iter(interleave(gather_objects(mine, self.world)))
                return [_sequences([*itertools.islice(completions, prompt.num_samples)]) for prompt in prompts]
            if dist.get_rank() == 0:
                print(f"warning: a generator failed ({problems[0]}); starting it again", file=sys.stderr, flush=True)
            show()
            self.supervisor.restart(failed=bool(self.supervisor.problem))
        raise InputError(f"sampling fails again and again ({problems[0]})")

    def _write(self, requests: list[Request]) -> list[Completion]:
        """Completions of this rank's requests; none if its generator has a problem."""
        generator = self.supervisor.generator
        if self.supervisor.problem or generator is None:
            return []
        try:
            return generator.submit(requests)()
        except (RuntimeError, WeightSyncError) as problem:
            self.supervisor.problem = innermost(problem)
            return []

    def score(self, prompts: list[Prompt]) -> list[torch.Tensor]:
        """Log-probabilities of the tokens of each prompt, [n], the first 0, by the trained model."""
        layout = self.handle.layout
        sequences = [
            TokenSequence(torch.tensor(prompt.tokens), torch.ones(len(prompt.tokens), dtype=torch.bool))
            for prompt in prompts
        ]
        packed = pack(
            sequences, self.config.microbatch_tokens, share=layout.data_share, min_microbatches=layout.parallel.pp
        )
        own = [logprobs.float().cpu() for logprobs in self.engine.logprobs(packed)]
        places = [place for microbatch in packed for place in microbatch.order]
        gathered = gather_objects(
            dict(zip(places, own, strict=True)) if layout.is_first_of_data_rank else {}, layout.world_control
        )
        found = {place: logprobs for one in gathered for place, logprobs in one.items()}
        return [found[place] for place in range(len(prompts))]


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
