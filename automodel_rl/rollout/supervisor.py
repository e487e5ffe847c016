"""The supervisor of a rank's generator: starts it, gives it weights, restarts it when it fails, and closes it."""

import datetime

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.config import GRPOConfig
from automodel_rl.errors import WeightSyncError, innermost
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.rollout.make_generator import make_generator
from automodel_rl.rollout.protocol import Generator
from automodel_rl.weight_sync.sync import WeightSync

PATIENCE = datetime.timedelta(hours=12)
"""Longest time that ranks wait for a rank whose generator is slow. A rank that dies is noticed at once."""


class GeneratorSupervisor:
    """Owns this rank's generator and its weight syncs. Methods are collectives of all ranks.

    Args:
        config: the run's config.
        handle: the model whose weights the generator gets.
        tokenizer: the model's tokenizer.

    Raises:
        InputError: the generator does not start.

    Attributes:
        generator: this rank's generator; None after it could not be restarted.
        problem: why the generator cannot write, "" if it can. `restart` repairs it.
        policy_version: the policy version that generators got last, from 1 on.
        world: a process group of all ranks. Its collectives may take as long as generators do.
    """

    def __init__(self, config: GRPOConfig, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase):
        self.config, self.handle, self.tokenizer = config, handle, tokenizer
        self.world = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.generator: Generator | None
        self.generator, transport = make_generator(config, handle, tokenizer)
        self.sync = WeightSync(handle, transport, config.weight_sync)
        self.problem = ""
        self.policy_version = 0
        self._policy_version_of: dict[int, int] = {0: 0}  # by the number of the weight sync

    def load_weights(self) -> None:
        """Gives all generators the weights that the model has now, as the next policy version."""
        self.policy_version += 1
        self._send()

    def policy_versions(self, versions: tuple[int, int]) -> tuple[int, int]:
        """The policy versions that two weight syncs sent. A sync after a failure sends the same version again."""
        oldest, newest = versions
        return self._policy_version_of[oldest], self._policy_version_of[newest]

    def restart(self, failed: bool) -> None:
        """Restarts generators that failed, and gives all the newest weights. What still fails becomes `problem`.

        Args:
            failed: whether this rank's generator failed. It is then closed, and a new one started.
        """
        if failed:
            self._replace()
        else:
            self.sync.disconnect()  # the failed generator may be a member of this rank's links
        gather_objects(
            "", self.world
        )  # waits: starting a generator may take longer than other collectives are allowed to
        self._send()

    def close(self) -> None:
        """Ends the generator."""
        self.sync.disconnect()
        if self.generator is not None:
            self.generator.close()

    def _send(self) -> None:
        self._policy_version_of[self.sync.version + 1] = self.policy_version
        try:
            self.sync.send()
        except WeightSyncError as problem:
            self.problem = str(problem)

    def _replace(self) -> None:
        if self.generator is not None:
            self.generator.close()
        self.generator, self.problem = None, ""
        self.sync.disconnect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the new generator needs the memory
        try:
            self.generator, transport = make_generator(self.config, self.handle, self.tokenizer)
        except Exception as problem:
            self.problem = innermost(problem)
        else:
            self.sync.reconnect(transport)
