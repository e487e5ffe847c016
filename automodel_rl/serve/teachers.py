"""Further base models of a service, which score prompts and are not trained."""

from collections.abc import Mapping, Sequence

from automodel_rl.batch import Packing
from automodel_rl.config import ServeConfig
from automodel_rl.model.handle import ModelHandle
from automodel_rl.policy.crew import Crew, further_model
from automodel_rl.policy.policy import Policy
from automodel_rl.rollout.prompt_scores import next_tokens, score, score_prompts
from automodel_rl.rollout.sampled import Refused, Sampled, SampledSequence, SamplePrompt
from automodel_rl.rollout.sampler import answers_of


class ServiceTeachers:
    """The further base models on the ranks of a service, driven by rank 0."""

    def __init__(self, config: ServeConfig, crew: Crew, handles: Mapping[str, ModelHandle]):
        self.policies: dict[str, Policy] = {}
        for name, handle in handles.items():
            parallel = handle.layout.parallel
            packing = Packing(config.microbatch_tokens, parallel.num_data_ranks, parallel.pp, cost=handle.flops)
            policy = self.policies[name] = Policy(crew, packing, handle.config.vocab_size, further_model(name))
            policy.begin()
            if config.teachers[name].between == "host":
                policy.to_host()

    def answer(self, name: str, prompts: Sequence[SamplePrompt]) -> list[Sampled | Refused]:
        """Returns one model's scores of prompts. The sample returned with each is the most likely next token."""
        policy = self.policies[name]
        rows = [prompt.tokens for prompt in prompts]
        with policy.on_device():
            scores = score_prompts(policy, prompts)
            tokens = next_tokens(policy, rows)
            of_next = score(policy, [[*row, token] for row, token in zip(rows, tokens, strict=True)])
        sequences = [
            [SampledSequence([token], [float(logprobs[-1])], "length")] * prompt.num_samples
            for prompt, token, logprobs in zip(prompts, tokens, of_next, strict=True)
        ]
        return answers_of(sequences, scores, {})
