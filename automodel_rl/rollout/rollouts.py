"""Rollouts: submits prompts to generators, and collects rewarded completions."""

import contextlib
import dataclasses
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from automodel_rl.batch import Video
from automodel_rl.config import RewardConfig, RolloutRunConfig
from automodel_rl.config.rollout import ENVIRONMENT
from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.media_inputs import prompt_media
from automodel_rl.generators.protocol import Completion
from automodel_rl.launch.background import then
from automodel_rl.launch.timeline import REWARDS
from automodel_rl.rollout.agents.agents import Agents
from automodel_rl.rollout.episodes.conversations import Conversations, scored_example
from automodel_rl.rollout.protocol import Promptlike, Rollout
from automodel_rl.rollout.rewards.counts import ErrorWatch
from automodel_rl.rollout.rewards.scorer import Scorer, Scoring


@dataclass
class _Pending:
    """State of one `submit`. Dictionaries are by index of the request.

    Attributes:
        asked: prompt and sample number (within the prompt's group) of each completion.
        group_size: completions per prompt.
        in_flight: futures of submitted completions; empty once waited for.
        scorings: scores that are already being computed.
        episodes: conversations that have begun.
        shown: shows how many are written, once they are waited for.
    """

    asked: list[tuple[Promptlike, int]]
    requests: list[Request]
    group_size: int
    fleet: Fleet
    in_flight: "list[Future[None]]" = field(default_factory=list)
    done: dict[int, Completion] = field(default_factory=dict)
    scorings: dict[int, Scoring] = field(default_factory=dict)
    episodes: dict[int, Any] = field(default_factory=dict)
    shown: Callable[[int], None] | None = None

    @property
    def missing(self) -> list[int]:
        """Indices of requests without a completion."""
        return [index for index in range(len(self.requests)) if index not in self.done]


class Rollouts:
    """Rewarded completions of prompts. Starts tools, environments and rewards in processes of their own.

    Args:
        config: the run's config.
        fleet: the generators, which may be started later.
        rewards: the rewards.
        template: the chat template, with the tokenizer.
        logs: folder for the output of environments and agents.
        worked: called from any thread when a completion was written or scored, with the lane in the timeline
            (launch/timeline.py) and the start by `time.time()`.
        shown: called with the number of completions when `take` waits for them. Returns a function that is called from
            any thread with the number of those written so far.

    Attributes:
        schemas: JSON schemas of the tools that prompts offer.
        warning: one line about sandboxing of tools that the system does not support; empty if nothing is missing.
        config: the config. For multi-turn runs its stop tokens include those with which the chat template ends turns.
        errors: warns of rewards whose calls fail.

    Example:
        >>> def program(policy, fleet, run):
        ...     rollouts = run.rollouts(fleet, run.config.rewards)
        ...     policy.begin()
        ...     fleet.start(rollouts.config.generator_spec)
        ...     fleet.sync()
        ...     with fleet.awake():
        ...         (group,) = rollouts.collect(run.prompts().take(1), 2, run.config.rollout.sampling)
        ...     return len(group), group[0].is_rewarded
        >>> run_program(program, load_config("my_grpo.yaml"))  # doctest: +ELLIPSIS
        loading ...
        (2, True)

    Raises:
        InputError: tools, the environment or a reward cannot be started, or the chat template does not support calls.
    """

    def __init__(
        self,
        config: RolloutRunConfig,
        fleet: Fleet,
        rewards: Sequence[RewardConfig],
        template: ChatTemplate,
        logs: Path,
        worked: Callable[[str, float], None] = lambda lane, began: None,
        shown: Callable[[int], Callable[[int], None]] = lambda total: lambda done: None,
    ):
        self.config, self.fleet, self.tokenizer = config, fleet, template.tokenizer
        self.schemas: tuple[dict[str, object], ...] = ()
        self.warning = ""
        self._worked, self._shown = worked, shown
        self._numbers, self._pending = 0, dict[int, _Pending]()
        self._taken: set[int] = set()
        self.conversations: Conversations | Agents | None = None
        if config.rollout.has_agent:
            needs_reward = ENVIRONMENT in [reward.function for reward in rewards]
            self.conversations = Agents(config, template, logs, lambda: fleet.policy_version, needs_reward=needs_reward)
        elif config.rollout.has_turns:
            self.conversations = Conversations(config, template, logs)
            self.schemas, self.warning = tuple(self.conversations.schemas), self.conversations.warning
        if self.conversations is not None:
            stops = tuple(sorted({*config.rollout.stop_token_ids, *self.conversations.stop_ids}))
            rollout = config.rollout.model_copy(update={"stop_token_ids": stops})
            self.config = config.model_copy(update={"rollout": rollout})
        try:
            self.scorer = Scorer([_for_all_ranks(reward, config.world_size) for reward in rewards])
        except BaseException:
            self._close_conversations()
            raise
        self.errors = ErrorWatch(rewards)

    def submit(
        self,
        prompts: Sequence[Promptlike],
        group_size: int,
        sampling: Sampling,
        *,
        keeps_routes: bool = False,
        fleet: Fleet | None = None,
    ) -> int:
        """Submits prompts to generators. They write while the model trains if they have memory of their own.

        Args:
            prompts: the prompts.
            group_size: completions per prompt.
            sampling: the sampling settings.
            keeps_routes: whether ranks keep the completions' routes for training, until `Policy.forget_routes` is
                called with the result of `numbers_taken`.
            fleet: the generators; None for those of training.

        Returns:
            A number for `take`.

        Raises:
            InputError: a prompt has a video and the generator is vLLM.
        """
        if self.config.rollout.generator.runs_vllm:
            _check_for_vllm(prompts)
        self._numbers += 1
        asked = [(prompt, sample) for prompt in prompts for sample in range(group_size)]
        requests = [
            Request(
                prompt.token_ids,
                completion_seed(self.config.seed, prompt.number, sample),
                sampling,
                conversation=None if self.conversations is None else index,
                media=prompt_media(prompt.media),
                rollouts=self._numbers if keeps_routes and self.config.router_replay.enabled else None,
            )
            for index, (prompt, sample) in enumerate(asked)
        ]
        pending = self._pending[self._numbers] = _Pending(asked, requests, group_size, fleet or self.fleet)
        # Environments do not begin before their generators can answer.
        if self.conversations is None or pending.fleet.writes_in_background:
            self._submit_missing(pending)
        return self._numbers

    def is_written(self, number: int) -> bool:
        """Whether `take(number)` would return without waiting for a generator."""
        return not self._pending[number].missing

    def take(self, number: int) -> list[list[Rollout]]:
        """Waits for the submission `number`, and returns the rewarded completions of each prompt.

        Raises:
            RolloutError: a generator failed more often than `rollout.retries` allows.
        """
        pending = self._pending.pop(number)
        pending.shown = self._shown(len(pending.requests))
        self._finish(pending)
        if any(request.rollouts is not None for request in pending.requests):
            self._taken.add(number)
        rollouts = self._rewarded(pending, number)
        size = pending.group_size
        return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]

    def collect(self, prompts: Sequence[Promptlike], group_size: int, sampling: Sampling) -> list[list[Rollout]]:
        """Submits and takes in one call, without routes; `prompts`, `group_size` and `sampling` as in `submit`.
        Generators must be awake (`Fleet.awake`).

        Raises:
            RolloutError: a generator failed more often than `rollout.retries` allows.
        """
        return self.take(self.submit(prompts, group_size, sampling))

    @property
    def notes(self) -> dict[str, str]:
        """One-line notes on agents for the console, by topic."""
        return dict(self.conversations.notes) if isinstance(self.conversations, Agents) else {}

    def numbers_taken(self) -> set[int]:
        """Returns the numbers of the submissions with routes that were taken since the last call."""
        taken, self._taken = self._taken, set()
        return taken

    def close(self) -> None:
        """Ends the processes of rewards, environments and agents."""
        self.scorer.close()
        self._close_conversations()

    def _close_conversations(self) -> None:
        if self.conversations is not None:
            self.conversations.close()

    def _submit_missing(self, pending: _Pending) -> None:
        """Submits the requests without a completion."""
        indices, began = pending.missing, time.time()
        if self.conversations is None:
            completions = pending.fleet.submit([pending.requests[index] for index in indices])
        else:
            for index in indices:
                if index not in pending.episodes:
                    prompt, _ = pending.asked[index]
                    pending.episodes[index] = self.conversations.episode(prompt, pending.requests[index])
            completions = self.conversations.submit(pending.fleet, [pending.episodes[index] for index in indices])
        pending.in_flight = [
            then(completion, functools.partial(self._store_and_score, pending, index, began))
            for index, completion in zip(indices, completions, strict=True)
        ]

    def _store_and_score(self, pending: _Pending, index: int, began: float, completion: Completion) -> None:
        """Stores a completion and starts to score it while others are still being written."""
        self._worked(pending.fleet.name_of(completion.writer), began)
        if completion.finish != "error":
            example = scored_example(pending.asked[index][0], completion)
            pending.scorings[index] = self._scoring(self._text(completion), example)
        pending.done[index] = completion
        if pending.shown is not None:
            pending.shown(len(pending.done))

    def _finish(self, pending: _Pending) -> None:
        """Waits until all completions are written, and restarts lost generators up to `rollout.retries` times. Those
        that do not restart are skipped if others can write.

        Raises:
            RolloutError: completions are missing after all retries.
        """
        retries, losses, fleet = self.config.rollout.retries, Counter[int](), pending.fleet
        for attempt in range(retries + 1):
            # Restart lost generators before waiting: others may wait for them and would never finish.
            if not fleet.lost:
                self._wait_for_missing(pending)
            lost = fleet.lost
            if not lost and not pending.missing:
                return
            losses.update(lost.keys())
            problems = fleet.postponed | lost
            if lost and attempt < retries:
                fleet.restart()
        fleet.postpone_restarts()
        self._wait_for_missing(pending)
        if pending.missing and not problems:
            raise RolloutError(
                fleet.no_member_error
                or "no generator is available for the missing completions: resume with --resume auto"
            )
        if pending.missing:
            rank = max(problems, key=lambda rank: losses[rank])
            raise RolloutError(f"the generator of rank {rank} failed {losses[rank]} times: {problems[rank]}")

    def _wait_for_missing(self, pending: _Pending) -> None:
        """Waits for missing completions, as long as a generator can write them."""
        while pending.missing and pending.fleet.can_write:
            if not pending.in_flight:
                self._submit_missing(pending)
            in_flight, pending.in_flight = pending.in_flight, []
            with contextlib.suppress(RolloutError):  # all were lost, perhaps before a restart
                pending.fleet.wait(in_flight)
        self._drop_stale(pending)

    def _drop_stale(self, pending: _Pending) -> None:
        """Drops completions older than `rollout.max_staleness` and marks their generators as lost. Conversations become
        errors instead."""
        newest, most = pending.fleet.policy_version, self.config.rollout.max_staleness
        for index, completion in [*pending.done.items()]:
            age = 0 if completion.versions is None else newest - completion.versions[0]
            if age <= most:
                continue
            if completion.conversation is not None:  # long conversations are not counted against the generator
                conversation = dataclasses.replace(completion.conversation, sampled=[], branches=[])
                error = f"its first turn is {age} policy versions old, more than rollout.max_staleness={most}"
                pending.done[index] = Completion([], [], "error", error, conversation=conversation)
                continue
            assert completion.writer is not None
            del pending.done[index]
            text = f"the generator used weights {age} policy versions old, more than rollout.max_staleness={most}"
            pending.fleet.mark_lost(completion.writer, text)

    def _scoring(self, text: str, example: Mapping[str, Any]) -> Scoring:
        """Starts to score a completion."""
        began = time.time()
        scoring = self.scorer.submit(text, example)
        scoring.add_done_callback(lambda: self._worked(REWARDS, began))
        return scoring

    def _text(self, completion: Completion) -> str:
        """Decodes the last turn of a completion, with special tokens except a final one."""
        tokens = completion.last_turn
        is_ended = bool(tokens) and tokens[-1] in self.tokenizer.all_special_ids
        return str(self.tokenizer.decode(tokens[:-1] if is_ended else tokens, skip_special_tokens=False))

    def _rewarded(self, pending: _Pending, number: int) -> list[Rollout]:
        completions = [self._replayable(pending.done[index]) for index in range(len(pending.asked))]
        texts = [self._text(completion) for completion in completions]
        scorings = []
        for index, (completion, text) in enumerate(zip(completions, texts, strict=True)):
            scoring = pending.scorings.get(index)
            # `_replayable` may have made it an error, whose text is empty.
            is_same = scoring is not None and scoring.completion == text
            example = scored_example(pending.asked[index][0], completion)
            scorings.append(scoring if scoring and is_same else self._scoring(text, example))
        began = time.time()
        scores = self.scorer.take(scorings)
        if self.scorer.takes_batches:
            self._worked(REWARDS, began)
        return [
            Rollout(completion, text, score, (number, index))
            for index, (completion, text, score) in enumerate(zip(completions, texts, scores, strict=True))
        ]

    def _replayable(self, completion: Completion) -> Completion:
        """Returns the completion, or an error if routes are missing and `router_replay.on_missing` is "error"."""
        missing = sum(branch.num_missing for branch in completion.branches([]))
        if missing and self.config.router_replay.on_missing == "error":
            text = f"{missing} of its expert choices are missing (router_replay.on_missing=error)"
            return Completion([], [], "error", text)
        return completion


def _for_all_ranks(reward: RewardConfig, num_ranks: int) -> RewardConfig:
    """Multiplies the processes of a reward by the number of ranks, up to the number of CPUs."""
    workers = max(reward.workers, min(reward.workers * num_ranks, os.cpu_count() or 1))
    return reward.model_copy(update={"workers": workers})


def completion_seed(seed: int, prompt: int, sample: int) -> int:
    """Derives a completion's seed from the run's seed, the prompt's number and the completion's number within the
    group."""
    return int(np.random.SeedSequence([seed, prompt, sample]).generate_state(1)[0])


def _check_for_vllm(prompts: Sequence[Promptlike]) -> None:
    """Raises InputError if a prompt has a video."""
    for prompt in prompts:
        if any(isinstance(item, Video) for item in prompt.media):
            raise InputError(
                f"prompt {prompt.number} has a video: rollout.generator=vllm accepts only images: use transformers, or "
                "pass frames as images"
            )
