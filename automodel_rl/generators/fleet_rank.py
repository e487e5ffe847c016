"""A rank of a fleet: the methods that a program calls on all ranks together."""

import contextlib
import functools
from collections.abc import Callable

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.engine.warm_up import warm_up
from automodel_rl.generator_messages import Generate
from automodel_rl.generators.joining_messages import Welcome
from automodel_rl.generators.make_generator import welcome_of
from automodel_rl.generators.protocol import RankGenerator
from automodel_rl.generators.relay import Relay
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.launch.listener import ListenerAddress
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.weight_sync.transport import Transport


class FleetRank:
    """This rank's generator, if any. All methods are collectives, which `Fleet` calls on all ranks.

    `sync_weights`, `wake` and `restart` return (rank, reason) if this rank's generator has failed, else None.

    Args:
        policy: the rank of the policy whose weights the generator gets.
        prepare: called with each started generator and its transport, before the first weight sync.

    Attributes:
        supervisor: set by `start`.
    """

    def __init__(
        self,
        policy: PolicyRank,
        tokenizer: PreTrainedTokenizerBase,
        prepare: Callable[[RankGenerator, Transport], None] = lambda generator, transport: None,
    ):
        self.policy, self.tokenizer, self.prepare = policy, tokenizer, prepare
        self.supervisor: GeneratorSupervisor
        self._relay: Relay
        self._open = contextlib.ExitStack()

    def close(self) -> None:
        """Ends this rank's generator, if any."""
        self._open.close()

    def start(self, spec: GeneratorSpec, address: ListenerAddress) -> tuple[int, bool] | None:
        """Starts generators. Returns (rank, writes_in_background) if this rank leads one, else None. `address` is the
        program's listener for ranks."""
        self.supervisor = GeneratorSupervisor(
            spec, self.policy.engine, self.tokenizer, self.prepare, functools.partial(self._warm_up, spec)
        )
        self._open.callback(self.supervisor.close)
        if not self.supervisor.ranks.is_leader:
            return None
        rank = dist.get_rank()
        self._relay = Relay(rank, self.supervisor, self.policy.routes, address)
        self._open.callback(self._relay.close)
        assert self.supervisor.generator is not None
        return rank, self.supervisor.generator.writes_in_background

    def _warm_up(self, spec: GeneratorSpec) -> None:
        """Compiles the trainer while generators start, unless they share its memory or sleep."""
        if not (spec.sleep_level or spec.shares_memory):
            warm_up(self.policy.engine, spec.longest_sequence)

    @property
    def _problem(self) -> tuple[int, str] | None:
        return (dist.get_rank(), self.supervisor.problem) if self.supervisor.problem else None

    def welcome(self, spec: GeneratorSpec) -> Welcome:
        """Returns the settings for generators that join."""
        return welcome_of(spec, self.policy.handle, self.tokenizer)

    def published_version(self) -> tuple[int, str] | None:
        """Returns number and hash of the version published last; None if writing it failed."""
        return self.supervisor.published

    def sync_weights(self, policy_version: int, needed: int | None) -> tuple[int, str] | None:
        """Syncs the model's current weights as `policy_version`. Sleeping generators load them when they wake.

        Args:
            needed: oldest published version that is still read, and must be kept; None if there is none.
        """
        self.supervisor.load_weights(policy_version, needed)
        return self._problem

    def wake(self) -> tuple[int, str] | None:
        """Wakes generators in the memory that they share with the trainer."""
        self.supervisor.wake()
        return self._problem

    def sleep(self) -> str:
        """Puts generators to sleep, which frees shared memory. Returns a warning about memory, or ""."""
        self.supervisor.sleep()
        return self.supervisor.offload.warning

    def restore(self) -> None:
        """Moves the trainer's weights back to the device."""
        self.supervisor.offload.restore()

    def write(self, requests: dict[int, list[Generate]]) -> None:
        """Has generators in their rank's process write the `requests`, by rank. Completions are sent to the program as
        they arrive."""
        if own := requests.get(dist.get_rank()):
            self._relay.write(own)

    def restart(self, lost: dict[int, str], postponed: frozenset[int]) -> tuple[int, str] | None:
        """Restarts failed generators with the model's current weights.

        Args:
            lost: why the program marked generators as lost, by rank.
            postponed: ranks whose generators are not restarted this time.
        """
        supervisor, rank = self.supervisor, dist.get_rank()
        supervisor.mark_lost(supervisor.generator, lost.get(rank, ""))
        supervisor.restart(bool(supervisor.problem) and rank not in postponed)
        return self._problem
