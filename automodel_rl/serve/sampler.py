"""Completions and log-probabilities of prompts under the weights that the trained model has."""

import itertools

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence, pack
from automodel_rl.config import ServeConfig, WeightSyncConfig
from automodel_rl.engine import Engine
from automodel_rl.errors import RolloutError
from automodel_rl.generator_messages import Request
from automodel_rl.lora.rank import set_scale
from automodel_rl.parallel.host_collectives import gather_objects, interleave
from automodel_rl.rollout.model_copy import ModelCopy
from automodel_rl.rollout.protocol import Completion
from automodel_rl.rollout.transformers_generator import TransformersGenerator, Writing
from automodel_rl.serve.messages import Prompt, Sampled, SampledSequence, Sampling
from automodel_rl.weight_sync.local import Local
from automodel_rl.weight_sync.sync import WeightSync

SEQUENCES_AT_ONCE = 4096
"""Most prompts that are packed at once."""


class Sampler:
    """Samples with a copy of the model on each rank, and scores with the trained model. Methods are collectives.

    Args:
        config: the service's config.
        engine: trains the model.
        tokenizer: the model's tokenizer, for stop texts.
    """

    def __init__(self, config: ServeConfig, engine: Engine, tokenizer: PreTrainedTokenizerBase):
        self.config, self.engine, self.handle, self.tokenizer = config, engine, engine.handle, tokenizer
        lora = self.handle.model.lora
        copy = ModelCopy(
            self.handle.config,
            self.handle.dtype,
            self.handle.layout.device,
            adapters=None if lora is None else (lora, self.handle.source),
        )
        self.generator = TransformersGenerator(copy, self._writing(Sampling(1)))
        local = Local(self.generator.receiver, self.handle.layout.device)
        self.sync = WeightSync(self.handle, local, WeightSyncConfig(adapters="merged" if lora is None else "alone"))

    def take_weights(self, scale: float) -> None:
        """Gives the copies the adapters, or all weights, that the trained model has.

        Args:
            scale: the factor of the adapters' output.
        """
        set_scale([self.generator.model], scale)
        self.sync.send()

    def complete(self, prompts: list[Prompt]) -> list[list[SampledSequence]]:
        """Completions of each prompt. All prompts are sampled in the same way.

        Args:
            prompts: the prompts, the same on every rank.

        Raises:
            RolloutError: a rank could not sample.
        """
        sampling = prompts[0].sampling
        requests = [
            Request(
                prompt.tokens,
                prompt.seed + number,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
            )
            for prompt in prompts
            for number in range(prompt.num_samples)
        ]
        own_stops = None if sampling.stop_tokens is None else {*sampling.stop_tokens}
        self.generator.write_as(self._writing(sampling), own_stops)
        mine = self.generator.generate(requests[dist.get_rank() :: dist.get_world_size()])
        completions = iter(interleave(gather_objects(mine, self.handle.layout.world_control)))
        return [[_sequence(c) for c in itertools.islice(completions, prompt.num_samples)] for prompt in prompts]

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

    def _writing(self, sampling: Sampling) -> Writing:
        return Writing(self.tokenizer, sampling.max_tokens, sampling.stop, self.config.batch_size)


def answers(
    prompts: list[Prompt], sequences: list[list[SampledSequence]], logprobs: dict[int, torch.Tensor]
) -> list[Sampled]:
    """The answer to each prompt.

    Args:
        prompts: the prompts.
        sequences: completions of each.
        logprobs: log-probabilities of the tokens of those prompts that asked for them, by the prompt's place.
    """
    return [
        Sampled(of_prompt, logprobs[place].numpy() if place in logprobs else None)
        for place, of_prompt in enumerate(sequences)
    ]


def _sequence(completion: Completion) -> SampledSequence:
    if completion.finish == "error":
        raise RolloutError(completion.error)
    return SampledSequence(completion.token_ids, completion.logprobs, completion.finish)
