"""Rewarded completions of a batch of prompts, written and scored by all ranks together."""

import datetime
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_rl.config import RolloutConfig
from automodel_rl.errors import RolloutError, innermost
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects, interleave
from automodel_rl.rollout.protocol import Completion, Promptlike, Request, Rollout, RolloutEngine
from automodel_rl.rollout.rewards.scorer import Scorer
from automodel_rl.rollout.weights import whole_weights

PATIENCE = datetime.timedelta(hours=12)
"""How long ranks wait for one whose completions or rewards take longer. Those that die are noticed at once."""


class RolloutCollector:
    """Owns this rank's engine and scorer. Every method is a collective.

    Args:
        make_engine: starts an engine, now and whenever one was lost.
        scorer: of completions.
        handle: whose weights the engine gets.
        tokenizer: of the model.
        config: temperature, retries.
        seed: of sampling.
    """

    def __init__(
        self,
        make_engine: Callable[[], RolloutEngine],
        scorer: Scorer,
        handle: ModelHandle,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        seed: int,
    ):
        self.make_engine, self.scorer, self.handle = make_engine, scorer, handle
        self.tokenizer, self.config, self.seed = tokenizer, config, seed
        # A group of its own: generating may take longer than other collectives are allowed to.
        self.world = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.engine: RolloutEngine | None = make_engine()
        self.lost = ""

    def load_weights(self) -> None:
        """Gives all engines the weights that the model has now. An engine that fails is started anew by `collect`."""
        weights = _Watched(whole_weights(self.handle))
        try:
            if self.engine is not None:
                self.engine.load_weights(weights)
        except Exception as problem:
            if weights.failed:
                raise
            self.lost = innermost(problem)
        for _ in weights:  # what the engine left; the other ranks gather it
            pass
        dist.barrier(self.world)  # engines may be shared, and be loaded by another rank

    def collect(self, prompts: Sequence[Promptlike], group_size: int, temperature: float) -> list[list[Rollout]]:
        """`group_size` rewarded completions of each prompt, equal on every rank.

        Raises:
            RolloutError: an engine failed more often than `rollout.retries` allows.
        """
        asked = [(prompt, sample) for prompt in prompts for sample in range(group_size)]
        mine = asked[dist.get_rank() :: dist.get_world_size()]
        requests = [Request(prompt.token_ids, self._seed(prompt, sample), temperature) for prompt, sample in mine]
        completions = self._generate(requests)
        texts = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
        rollouts = [
            Rollout(completion, text, self.scorer(text, prompt.example))
            for completion, text, (prompt, _) in zip(completions, texts, mine, strict=True)
        ]
        flat = interleave(gather_objects(rollouts, self.world))
        return [flat[start : start + group_size] for start in range(0, len(flat), group_size)]

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.scorer.close()

    def _generate(self, requests: list[Request]) -> list[Completion]:
        """This rank's completions. Ranks that fail start their engine anew; all wait for them."""
        completions: list[Completion] | None = None
        for attempt in range(self.config.retries + 1):
            error = self.lost
            if completions is None and self.engine is not None and not error:
                try:
                    completions = self.engine.generate(requests)
                except Exception as problem:
                    error = innermost(problem)
            errors = gather_objects(error, self.world)
            failed = next((rank for rank, text in enumerate(errors) if text), None)
            if failed is None and completions is not None:
                return completions
            if attempt < self.config.retries:
                self._start_again(bool(error))
        raise RolloutError(f"the rollout engine of rank {failed} failed {attempt + 1} times: {errors[failed or 0]}")

    def _start_again(self, failed: bool) -> None:
        if failed:
            if self.engine is not None:
                self.engine.close()
            self.engine, self.lost = None, ""  # its memory is needed for the next
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            try:
                self.engine = self.make_engine()
            except Exception as problem:
                self.lost = innermost(problem)
        self.load_weights()

    def _seed(self, prompt: Promptlike, sample: int) -> int:
        return int(np.random.SeedSequence([self.seed, prompt.number, sample]).generate_state(1)[0])


class _Watched(Iterator[tuple[str, Tensor]]):
    """Passes weights on, and knows whether gathering them failed, which no other engine mends."""

    def __init__(self, weights: Iterator[tuple[str, Tensor]]):
        self.weights, self.failed = weights, False

    def __next__(self) -> tuple[str, Tensor]:
        try:
            return next(self.weights)
        except StopIteration:
            raise
        except Exception:
            self.failed = True
            raise
