"""This rank's generator over a whole run: started, given weights, started anew when it fails, and closed."""

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
"""How long ranks wait for one whose generator starts or writes longer. Those that die are noticed at once."""


class GeneratorSupervisor:
    """Owns this rank's generator and its weights. Methods are collectives of all ranks.

    Args:
        config: of the run.
        handle: whose weights the generator gets.
        tokenizer: of the model.

    Raises:
        InputError: the generator does not start.

    Attributes:
        generator: None while it could not be started anew.
        problem: why the generator cannot write, "" if it can. `restart` mends it.
        policy_version: of the weights that generators got last, from 1 on; completions are dated by it.
        world: process group of all ranks, whose collectives may take as long as generators do.
    """

    def __init__(self, config: GRPOConfig, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase):
        self.config, self.handle, self.tokenizer = config, handle, tokenizer
        self.world = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.generator: Generator | None
        self.generator, transport = make_generator(config, handle, tokenizer)
        self.sync = WeightSync(handle, transport, config.weight_sync)
        self.problem = ""
        self.policy_version = 0
        self._policy_version_of: dict[int, int] = {0: 0}  # by the version of the weight sync

    def load_weights(self) -> None:
        """Gives all generators the weights that the model has now, as the next policy version."""
        self.policy_version += 1
        self._send()

    def policy_versions(self, versions: tuple[int, int]) -> tuple[int, int]:
        """The policy versions that two weight syncs brought; syncs that mend a failure bring the same one again."""
        oldest, newest = versions
        return self._policy_version_of[oldest], self._policy_version_of[newest]

    def restart(self, failed: bool) -> None:
        """Mends generators, and gives all of them the newest weights again. What still fails is this rank's `problem`.

        Args:
            failed: this rank's generator failed: it is closed, and another one started.
        """
        if failed:
            self._replace()
        else:
            self.sync.disconnect()  # links may have had the failed generator for a member
        gather_objects("", self.world)  # starting a generator may take longer than other collectives are allowed to
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
            torch.cuda.empty_cache()  # its memory is needed for the next
        try:
            self.generator, transport = make_generator(self.config, self.handle, self.tokenizer)
        except Exception as problem:
            self.problem = innermost(problem)
        else:
            self.sync.reconnect(transport)
