"""Collects rewarded completions of a batch of prompts. All ranks write and score their share."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import read_routes
from automodel_rl.config import GRPOConfig
from automodel_rl.errors import RolloutError, innermost
from automodel_rl.generator_messages import Request
from automodel_rl.parallel.host_collectives import gather_objects, interleave
from automodel_rl.rollout.protocol import Completion, Generator, Promptlike, Rollout
from automodel_rl.rollout.rewards.scorer import Scorer, Scoring
from automodel_rl.rollout.supervisor import GeneratorSupervisor


@dataclass
class Pending:
    """Completions that generators are writing.

    Attributes:
        group_size: number of completions of each prompt.
        mine: this rank's share of the completions: for each, its prompt and its number among the prompt's completions.
        requests: the requests for them.
        generator: the generator that was asked.
        scorings: completions that are scored already, by their place among the requests.
        wait: waits for the completions and returns them.
        error: why the generator could not be asked, or "".
    """

    group_size: int
    mine: list[tuple[Promptlike, int]]
    requests: list[Request]
    generator: Generator | None
    wait: Callable[[], list[Completion]]
    error: str = ""
    scorings: dict[int, Scoring] = field(default_factory=dict)


class RolloutCollector:
    """Asks generators for completions, takes them and scores them. Every method but `close` is a collective.

    Args:
        config: the run's config.
        supervisor: the supervisor of this rank's generator.
        tokenizer: the model's tokenizer.
        scorer: scores completions; closed with the collector.
    """

    def __init__(
        self, config: GRPOConfig, supervisor: GeneratorSupervisor, tokenizer: PreTrainedTokenizerBase, scorer: Scorer
    ):
        self.config, self.supervisor, self.tokenizer, self.scorer = config, supervisor, tokenizer, scorer
        self.handle, self.world = supervisor.handle, supervisor.world

    def submit(
        self, prompts: Sequence[Promptlike], group_size: int, temperature: float, top_p: float = 1.0, top_k: int = 0
    ) -> Pending:
        """Lets all generators begin to write `group_size` completions of each prompt."""
        asked = [(prompt, sample) for prompt in prompts for sample in range(group_size)]
        mine = asked[self.supervisor.ranks.dealt]
        requests = [
            Request(prompt.token_ids, self._seed(prompt, sample), temperature, top_p, top_k) for prompt, sample in mine
        ]
        pending = Pending(group_size, mine, requests, self.supervisor.generator, list)
        self._ask(pending)
        return pending

    def take(self, pending: Pending) -> list[list[Rollout]]:
        """The rewarded completions of each prompt, equal on every rank. Only the generator's rank has their routes.

        Raises:
            RolloutError: a generator failed more often than `rollout.retries` allows.
        """
        written = zip(self._wait(pending), pending.mine, strict=True)
        return self._rewarded([self._with_routes(completion, prompt) for completion, (prompt, _) in written], pending)

    def collect(
        self, prompts: Sequence[Promptlike], group_size: int, temperature: float, top_p: float = 1.0, top_k: int = 0
    ) -> list[list[Rollout]]:
        """Submits prompts and takes their `group_size` rewarded completions, equal on every rank and without routes.

        Raises:
            RolloutError: a generator failed more often than `rollout.retries` allows.
        """
        pending = self.submit(prompts, group_size, temperature, top_p, top_k)
        return self._rewarded([dataclasses.replace(c, routes=None) for c in self._wait(pending)], pending)

    def close(self) -> None:
        """Ends the processes of rewards. The supervisor closes the generator."""
        self.scorer.close()

    def _ask(self, pending: Pending) -> None:
        pending.generator, pending.error = self.supervisor.generator, self.supervisor.problem
        if pending.generator is None or pending.error:
            return
        scorings: dict[int, Scoring] = {}
        pending.scorings = scorings

        def score(place: int, completion: Completion) -> None:
            """Begins to score a completion while others are still written."""
            if self._checked(completion).finish != "error":
                scorings[place] = self.scorer.submit(self._text(completion), pending.mine[place][0].example)

        try:
            pending.wait = pending.generator.submit(pending.requests, score)
        except Exception as problem:
            pending.error = innermost(problem)

    def _wait(self, pending: Pending) -> list[Completion]:
        """This rank's completions. Generators that fail are restarted, and all ranks wait for them."""
        completions: list[Completion] | None = None
        for attempt in range(self.config.rollout.retries + 1):
            # First look for generators that lost their weights: others may wait for these, and would never finish.
            error = self.supervisor.problem
            errors = gather_objects(error, self.world)
            if not any(errors):
                if completions is None:
                    completions, error = self._completions(pending)
                errors = gather_objects(error, self.world)
            failed = next((rank for rank, text in enumerate(errors) if text), None)
            if failed is None and completions is not None:
                return completions
            if attempt < self.config.rollout.retries:
                self.supervisor.restart(bool(error))
        raise RolloutError(f"the generator of rank {failed} failed {attempt + 1} times: {errors[failed or 0]}")

    def _completions(self, pending: Pending) -> tuple[list[Completion] | None, str]:
        """Completions, or why there are none."""
        if pending.generator is not self.supervisor.generator:  # the generator that was asked is gone
            self._ask(pending)
        if pending.error:
            return None, pending.error
        try:
            completions = pending.wait()
        except Exception as problem:
            return None, innermost(problem)
        completions = [self._dated(self._checked(completion)) for completion in completions]
        newest, most = self.supervisor.policy_version, self.config.rollout.max_staleness
        oldest = min((c.versions[0] for c in completions if c.versions is not None), default=newest)
        if newest - oldest > most:
            return None, (
                f"the generator wrote with weights {newest - oldest} policy versions old, of "
                f"rollout.max_staleness={most}"
            )
        return completions, ""

    def _checked(self, completion: Completion) -> Completion:
        """The completion, or an error if it has a token outside the vocabulary, as from a server with another model."""
        known = self.handle.config.vocab_size
        strange = next((token for token in completion.token_ids if token >= known), None)
        if strange is None:
            return completion
        return Completion([], [], "error", f"the generator's token {strange} is none of the model's {known}")

    def _dated(self, completion: Completion) -> Completion:
        """The completion with policy versions in place of numbers of weight syncs."""
        if completion.versions is None:
            return completion
        return dataclasses.replace(completion, versions=self.supervisor.policy_versions(completion.versions))

    def _with_routes(self, completion: Completion, prompt: Promptlike) -> Completion:
        """The completion with `Routes` in place of the generator's report, or an error if they cannot be replayed."""
        replay, shape = self.config.router_replay, self.handle.router_shape
        if not replay.enabled or shape is None or completion.finish == "error":
            return completion
        try:
            routes = read_routes(completion.routes, len(prompt.token_ids), len(completion.token_ids), shape)
        except Exception as problem:
            return Completion([], [], "error", f"its routes cannot be followed: {innermost(problem)}")
        missing = routes.num_missing()
        if missing and replay.on_missing == "error":
            total = (len(routes) - 1) * len(shape.layers)
            text = f"{missing} of its {total} choices of experts are missing, and router_replay.on_missing=error"
            return Completion([], [], "error", text)
        return dataclasses.replace(completion, routes=routes)

    def _text(self, completion: Completion) -> str:
        return str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))

    def _rewarded(self, completions: Sequence[Completion], pending: Pending) -> list[list[Rollout]]:
        rank, ranks = dist.get_rank(), self.supervisor.ranks
        texts, prompts = [self._text(completion) for completion in completions], [prompt for prompt, _ in pending.mine]
        scorings = []
        for place, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            scoring = pending.scorings.get(place)
            # A completion that is checked later may become an error, whose text is empty.
            is_same = scoring is not None and scoring.completion == text
            scorings.append(scoring if scoring and is_same else self.scorer.submit(text, prompt.example))
        rollouts = [
            Rollout(completion, text, score, writer=rank)
            for completion, text, score in zip(completions, texts, self.scorer.take(scorings), strict=True)
        ]
        of_ranks = gather_objects([_without_routes(rollout) for rollout in rollouts], self.world)
        flat = interleave([of_ranks[writer] for writer in ranks.writers])
        if ranks.leads:
            flat[ranks.dealt] = rollouts
        return [flat[start : start + pending.group_size] for start in range(0, len(flat), pending.group_size)]

    def _seed(self, prompt: Promptlike, sample: int) -> int:
        return int(np.random.SeedSequence([self.config.seed, prompt.number, sample]).generate_state(1)[0])


def _without_routes(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, completion=dataclasses.replace(rollout.completion, routes=None))
