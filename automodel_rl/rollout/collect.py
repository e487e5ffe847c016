"""Rewarded completions of a batch of prompts, written and scored by all ranks together."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.batch import read_routes
from automodel_rl.config import GRPOConfig
from automodel_rl.errors import RolloutError, WeightSyncError, innermost
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects, interleave
from automodel_rl.rollout.make_engine import make_engine
from automodel_rl.rollout.protocol import Completion, Promptlike, Request, Rollout, RolloutEngine
from automodel_rl.rollout.rewards.scorer import Scorer
from automodel_rl.weight_sync.sync import WeightSync

PATIENCE = datetime.timedelta(hours=12)
"""How long ranks wait for one whose completions or rewards take longer. Those that die are noticed at once."""


@dataclass
class Pending:
    """Completions that engines are writing.

    Attributes:
        group_size: completions of each prompt.
        mine: this rank's share of the completions: a prompt and the number among its completions, for each.
        requests: for them.
        engine: that was asked.
        wait: for what it writes.
        error: it could not be asked.
    """

    group_size: int
    mine: list[tuple[Promptlike, int]]
    requests: list[Request]
    engine: RolloutEngine | None
    wait: Callable[[], list[Completion]]
    error: str = ""


class RolloutCollector:
    """Owns this rank's engine and scorer, and the weights' way to the engine. Every method is a collective.

    Args:
        config: of the run.
        handle: whose weights the engine gets.
        tokenizer: of the model.
        scorer: of completions.

    Raises:
        InputError: the engine does not start.

    Attributes:
        sync: the weights' way.
        updates: of the weights that engines got, by which the age of completions is told.
    """

    def __init__(self, config: GRPOConfig, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase, scorer: Scorer):
        self.config, self.handle, self.tokenizer, self.scorer = config, handle, tokenizer, scorer
        # A group of its own: generating may take longer than other collectives are allowed to.
        self.world = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.engine: RolloutEngine | None
        self.engine, transport = make_engine(config, handle, tokenizer)
        self.sync = WeightSync(handle, transport, config.weight_sync)
        self.lost = ""
        self.updates = 0
        self._update_of: dict[int, int] = {0: 0}

    def load_weights(self) -> None:
        """Gives all engines the weights of an update. An engine that fails is started anew by `take`."""
        self.updates += 1
        self._sync()

    def _sync(self) -> None:
        self._update_of[self.sync.version + 1] = self.updates  # syncs that mend a failure are no updates
        try:
            self.sync.update()
        except WeightSyncError as problem:
            self.lost = str(problem)

    def submit(self, prompts: Sequence[Promptlike], group_size: int, temperature: float) -> Pending:
        """Lets all engines begin with `group_size` completions of each prompt."""
        asked = [(prompt, sample) for prompt in prompts for sample in range(group_size)]
        mine = asked[dist.get_rank() :: dist.get_world_size()]
        requests = [Request(prompt.token_ids, self._seed(prompt, sample), temperature) for prompt, sample in mine]
        pending = Pending(group_size, mine, requests, self.engine, list)
        self._ask(pending)
        return pending

    def take(self, pending: Pending) -> list[list[Rollout]]:
        """The rewarded completions of each prompt, equal on every rank but for routes, which stay where they are.

        Raises:
            RolloutError: an engine failed more often than `rollout.retries` allows.
        """
        written = zip(self._wait(pending), pending.mine, strict=True)
        return self._rewarded([self._with_routes(completion, prompt) for completion, (prompt, _) in written], pending)

    def _rewarded(self, completions: Sequence[Completion], pending: Pending) -> list[list[Rollout]]:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        texts = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        rollouts = [
            Rollout(completion, text, self.scorer(text, prompt.example), writer=rank)
            for completion, text, (prompt, _) in zip(completions, texts, pending.mine, strict=True)
        ]
        flat = interleave(gather_objects([_without_routes(rollout) for rollout in rollouts], self.world))
        flat[rank::num_ranks] = rollouts
        return [flat[start : start + pending.group_size] for start in range(0, len(flat), pending.group_size)]

    def collect(self, prompts: Sequence[Promptlike], group_size: int, temperature: float) -> list[list[Rollout]]:
        """`group_size` rewarded completions of each prompt, equal on every rank, without routes.

        Raises:
            RolloutError: an engine failed more often than `rollout.retries` allows.
        """
        pending = self.submit(prompts, group_size, temperature)
        return self._rewarded([dataclasses.replace(c, routes=None) for c in self._wait(pending)], pending)

    def close(self) -> None:
        self.sync.disconnect()
        if self.engine is not None:
            self.engine.close()
        self.scorer.close()

    def _ask(self, pending: Pending) -> None:
        pending.engine, pending.error = self.engine, self.lost
        if self.engine is None or self.lost:
            return
        try:
            pending.wait = self.engine.submit(pending.requests)
        except Exception as problem:
            pending.error = innermost(problem)

    def _wait(self, pending: Pending) -> list[Completion]:
        """This rank's completions. Ranks that fail start their engine anew; all wait for them."""
        completions: list[Completion] | None = None
        for attempt in range(self.config.rollout.retries + 1):
            # First who has lost its weights: what the others are waiting for may wait for these.
            error, errors = self.lost, gather_objects(self.lost, self.world)
            if not any(errors):
                if completions is None:
                    completions, error = self._completions(pending)
                errors = gather_objects(error, self.world)
            failed = next((rank for rank, text in enumerate(errors) if text), None)
            if failed is None and completions is not None:
                return completions
            if attempt < self.config.rollout.retries:
                self._start_again(bool(error))
        raise RolloutError(f"the rollout engine of rank {failed} failed {attempt + 1} times: {errors[failed or 0]}")

    def _completions(self, pending: Pending) -> tuple[list[Completion] | None, str]:
        """Completions, or why there are none."""
        if pending.engine is not self.engine:  # the one that was asked is gone
            self._ask(pending)
        if pending.error:
            return None, pending.error
        try:
            completions = pending.wait()
        except Exception as problem:
            return None, innermost(problem)
        completions = [self._by_update(self._checked(completion)) for completion in completions]
        oldest = min((c.versions[0] for c in completions if c.versions is not None), default=self.updates)
        staleness, most = self.updates - oldest, self.config.rollout.max_staleness
        if staleness > most:
            return None, f"the engine wrote with weights {staleness} updates old, of rollout.max_staleness={most}"
        return completions, ""

    def _checked(self, completion: Completion) -> Completion:
        """As it is, or an error if it has a token that the model does not know: engines may be elsewhere."""
        known = self.handle.config.vocab_size
        strange = next((token for token in completion.token_ids if token >= known), None)
        if strange is None:
            return completion
        return Completion([], [], "error", f"the engine's token {strange} is none of the model's {known}")

    def _by_update(self, completion: Completion) -> Completion:
        """With the updates that wrote it in place of the syncs that brought them."""
        if completion.versions is None:
            return completion
        oldest, newest = completion.versions
        return dataclasses.replace(completion, versions=(self._update_of[oldest], self._update_of[newest]))

    def _with_routes(self, completion: Completion, prompt: Promptlike) -> Completion:
        """With `Routes` in place of what the engine said of them. Without any that can be followed it has failed."""
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

    def _start_again(self, failed: bool) -> None:
        if failed:
            if self.engine is not None:
                self.engine.close()
            self.engine, self.lost = None, ""  # its memory is needed for the next
            self.sync.disconnect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            try:
                self.engine, transport = make_engine(self.config, self.handle, self.tokenizer)
                self.sync.transport = transport
            except Exception as problem:
                self.lost = innermost(problem)
        else:
            self.sync.disconnect()  # links may have had the failed engine for a member
        gather_objects("", self.world)  # starting an engine may take longer than other collectives are allowed to
        self._sync()

    def _seed(self, prompt: Promptlike, sample: int) -> int:
        return int(np.random.SeedSequence([self.config.seed, prompt.number, sample]).generate_state(1)[0])


def _without_routes(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, completion=dataclasses.replace(rollout.completion, routes=None))
