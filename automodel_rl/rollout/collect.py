"""Collects rewarded completions of a batch of prompts. All ranks write and score their share."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import Routes, RoutesAt, join_turns, read_routes
from automodel_rl.config import RolloutRunConfig
from automodel_rl.errors import RolloutError, innermost
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.media_inputs import prompt_media
from automodel_rl.generators.protocol import Completion, Generator, OnFinished, TurnRoutes
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.rollout.episodes.conversations import Conversations, scored_example
from automodel_rl.rollout.episodes.episode import Episode
from automodel_rl.rollout.protocol import Promptlike, Rollout
from automodel_rl.rollout.rewards.scorer import Scorer, Scoring


@dataclass
class Pending:
    """Completions that generators are writing.

    Attributes:
        asked: the completions that all ranks were asked for: for each, its prompt and its number among the prompt's.
        requests: the requests for them.
        shares: places among them, by the rank whose generator writes them.
        generator: the generator that was asked.
        underway: places that it was asked for.
        wait: waits for them and returns them.
        error: why the generator could not be asked, or "".
        done: this rank's completions, by place.
        scorings: completions that are scored already, by place.
        episodes: conversations that this rank has begun, by place.
    """

    asked: list[tuple[Promptlike, int]]
    requests: list[Request]
    shares: list[list[int]]
    generator: Generator | None = None
    underway: list[int] = field(default_factory=list)
    wait: Callable[[], list[Completion]] = list
    error: str = ""
    done: dict[int, Completion] = field(default_factory=dict)
    scorings: dict[int, Scoring] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Places of this rank's share that are not written yet."""
        return [place for place in self.shares[dist.get_rank()] if place not in self.done]

    def deal_again(self, lost: Sequence[Sequence[int]], others: Sequence[int]) -> None:
        """Deals what generators that failed have not written to other ranks.

        Args:
            lost: the places of each rank that it will not write.
            others: the ranks that write them.
        """
        self.shares = [
            [place for place in share if place not in gone] for share, gone in zip(self.shares, lost, strict=True)
        ]
        every = [place for gone in lost for place in gone]
        for number, rank in enumerate(others):
            self.shares[rank] += every[number :: len(others)]


@dataclass(frozen=True)
class Written:
    """What a rank has written.

    Attributes:
        rollouts: rollouts without routes, by place.
        routes: their routes, by key.
    """

    rollouts: dict[int, Rollout]
    routes: dict[tuple[int, int], Routes]


class RolloutCollector:
    """Asks generators for completions, takes them and scores them. Every method is a collective.

    Args:
        config: the run's config.
        supervisor: the supervisor of this rank's generator.
        tokenizer: the model's tokenizer.
        scorer: scores completions.
        conversations: drives completions of several turns; None if they have one.
    """

    def __init__(
        self,
        config: RolloutRunConfig,
        supervisor: GeneratorSupervisor,
        tokenizer: PreTrainedTokenizerBase,
        scorer: Scorer,
        conversations: Conversations | None = None,
    ):
        self.conversations = conversations
        self.config, self.supervisor, self.tokenizer, self.scorer = config, supervisor, tokenizer, scorer
        self.handle, self.world = supervisor.handle, supervisor.world

    def submit(self, prompts: Sequence[Promptlike], group_size: int, sampling: Sampling) -> Pending:
        """Lets all generators begin to write `group_size` completions of each prompt."""
        asked = [(prompt, sample) for prompt in prompts for sample in range(group_size)]
        requests = [
            Request(prompt.token_ids, self._seed(prompt, sample), sampling, media=prompt_media(prompt.media))
            for prompt, sample in asked
        ]
        pending = Pending(asked, requests, self.supervisor.ranks.deal(len(asked)))
        self._ask(pending)
        return pending

    def take(self, pending: Pending, number: int) -> Written:
        """This rank's rewarded completions.

        Args:
            pending: what `submit` returned.
            number: a number that no other pending completions have.

        Raises:
            RolloutError: a generator failed more often than `rollout.retries` allows.
        """
        completions = self._wait(pending)
        return self._rewarded(
            {place: self._with_routes(c, pending.asked[place][0]) for place, c in completions.items()}, pending, number
        )

    def _ask(self, pending: Pending) -> None:
        """Lets the generator begin with what is missing of this rank's share."""
        pending.generator, pending.error = self.supervisor.generator, self.supervisor.problem
        pending.underway = places = pending.missing
        if pending.generator is None or pending.error:
            return

        def score(number: int, completion: Completion) -> None:
            """Begins to score a completion while others are still written."""
            if self._checked(completion).finish != "error":
                place = places[number]
                example = scored_example(pending.asked[place][0], completion)
                pending.scorings[place] = self.scorer.submit(self._text(completion), example)

        try:
            if self.conversations is None:
                pending.wait = pending.generator.submit([pending.requests[place] for place in places], score)
            else:
                pending.wait = self._converse(self.conversations, pending, score)
        except Exception as problem:
            pending.error = innermost(problem)

    def _converse(
        self, conversations: Conversations, pending: Pending, on_finished: OnFinished
    ) -> Callable[[], list[Completion]]:
        """Begins this rank's conversations, or goes on with those that a lost generator has left."""
        assert pending.generator is not None
        for place in pending.episodes.keys() - set(pending.shares[dist.get_rank()]):  # others write these now
            pending.episodes.pop(place).environment.close()
        for place in pending.underway:
            if place not in pending.episodes:
                pending.episodes[place] = conversations.episode(pending.asked[place][0], pending.requests[place])
        episodes = [pending.episodes[place] for place in pending.underway]
        return conversations.submit(pending.generator, episodes, on_finished)

    def _wait(self, pending: Pending) -> dict[int, Completion]:
        """This rank's completions, by place. Generators that fail are started again, while others write their share."""
        for attempt in range(self.config.rollout.retries + 1):
            is_last = attempt == self.config.rollout.retries
            # First look for generators that lost their weights: others may wait for these, and would never finish.
            error = self.supervisor.problem
            errors = gather_objects(error, self.world)
            if not any(errors):
                error = self._write(pending)
                errors = gather_objects(error, self.world)
                if any(errors) and not is_last:
                    lost = gather_objects(pending.missing if error else [], self.world)
                    others = [rank for rank in self.supervisor.ranks.writers if not errors[rank]]
                    if others:
                        pending.deal_again(lost, others)
                    error = error or self._write(pending)
            failed = next((rank for rank, text in enumerate(errors) if text), None)
            if failed is None:
                return pending.done
            if not is_last:
                self.supervisor.restart(bool(error))
        raise RolloutError(f"the generator of rank {failed} failed {attempt + 1} times: {errors[failed or 0]}")

    def _write(self, pending: Pending) -> str:
        """Waits until this rank's share is written. Returns why it cannot be, or ""."""
        if pending.generator is not self.supervisor.generator or pending.underway != pending.missing:
            self._ask(pending)  # the generator that was asked is gone, or the share has grown
        if pending.error:
            return pending.error
        try:
            completions = pending.wait()
        except Exception as problem:
            return innermost(problem)
        completions = [self._dated(self._checked(completion)) for completion in completions]
        newest, most = self.supervisor.policy_version, self.config.rollout.max_staleness
        if self.conversations is not None:  # a long one costs itself: the generator is not to blame
            completions = [_without_stale(completion, newest, most) for completion in completions]
        oldest = min((c.versions[0] for c in completions if c.versions is not None), default=newest)
        if newest - oldest > most:
            return (
                f"the generator wrote with weights {newest - oldest} policy versions old, of "
                f"rollout.max_staleness={most}"
            )
        pending.done |= zip(pending.underway, completions, strict=True)
        return ""

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
            turns = completion.routes
            if completion.conversation is None:
                turns = [TurnRoutes(len(prompt.token_ids), len(completion.token_ids), completion.routes)]
            routes = join_turns([read_routes(turn.payload, turn.num_before, turn.num_tokens, shape) for turn in turns])
        except Exception as problem:
            return Completion([], [], "error", f"its routes cannot be followed: {innermost(problem)}")
        missing = routes.num_missing()
        if missing and replay.on_missing == "error":
            total = (len(routes) - 1) * len(shape.layers)
            text = f"{missing} of its {total} choices of experts are missing, and router_replay.on_missing=error"
            return Completion([], [], "error", text)
        return dataclasses.replace(completion, routes=routes)

    def _text(self, completion: Completion) -> str:
        """The completion's text: of several turns, that of the last."""
        return str(self.tokenizer.decode(completion.last_turn, skip_special_tokens=True))

    def _rewarded(self, written: Mapping[int, Completion], pending: Pending, number: int) -> Written:
        """The rollouts of these completions, given by their place."""
        texts = {place: self._text(completion) for place, completion in written.items()}
        scorings = []
        for place, text in texts.items():
            scoring = pending.scorings.get(place)
            # A completion that is checked later may become an error, whose text is empty.
            is_same = scoring is not None and scoring.completion == text
            example = scored_example(pending.asked[place][0], written[place])
            scorings.append(scoring if scoring and is_same else self.scorer.submit(text, example))
        found = Written({}, {})
        for (place, completion), score in zip(written.items(), self.scorer.take(scorings), strict=True):
            routes = completion.routes if isinstance(completion.routes, Routes) else None
            at, missing, key = None, 0, (number, place)
            if routes is not None:
                at, missing, found.routes[key] = RoutesAt(dist.get_rank(), key), routes.num_missing(), routes
            completion = dataclasses.replace(completion, routes=None)
            found.rollouts[place] = Rollout(completion, texts[place], score, key, at, missing)
        return found

    def _seed(self, prompt: Promptlike, sample: int) -> int:
        return int(np.random.SeedSequence([self.config.seed, prompt.number, sample]).generate_state(1)[0])


def _without_stale(completion: Completion, newest: int, most: int) -> Completion:
    """The completion, or an error if some of it is older than the run allows."""
    if completion.versions is None or newest - completion.versions[0] <= most:
        return completion
    age = newest - completion.versions[0]
    error = f"its first turn is {age} policy versions old, of rollout.max_staleness={most}"
    conversation = completion.conversation and dataclasses.replace(completion.conversation, sampled=[])
    return Completion([], [], "error", error, conversation=conversation)
