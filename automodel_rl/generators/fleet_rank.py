"""A rank of a fleet: the methods that a program calls on all ranks' generators together."""

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
from automodel_rl.launch.door import DoorAddress
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.weight_sync.transport import Transport


class FleetRank:
    """This rank's generator, if it has one. Its methods are collectives, which `Fleet` calls on all ranks.

    `sync_weights`, `wake` and `restart` return (rank, reason) if this rank's generator has failed, else None.

    Args:
        policy: this rank of the policy, whose weights the generator gets.
        tokenizer: the model's tokenizer.
        prepare: called with every generator that is started and its transport, before it gets weights.

    Attributes:
        supervisor: the supervisor of this rank's generator; there from `start` on.
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
        """Ends this rank's generator, if one is running."""
        self._open.close()

    def start(self, spec: GeneratorSpec, address: DoorAddress) -> tuple[int, bool] | None:
        """Starts generators. Returns the rank if it leads one, and whether that works alone.

        Args:
            spec: the generator that is asked for.
            address: where the program waits for these ranks.
        """
        self.supervisor = GeneratorSupervisor(
            spec, self.policy.engine, self.tokenizer, self.prepare, functools.partial(self._warm_up, spec)
        )
        self._open.callback(self.supervisor.close)
        if not self.supervisor.ranks.leads:
            return None
        rank = dist.get_rank()
        self._relay = Relay(rank, self.supervisor, self.policy.routes, address)
        self._open.callback(self._relay.close)
        assert self.supervisor.generator is not None
        return rank, self.supervisor.generator.works_alone

    def _warm_up(self, spec: GeneratorSpec) -> None:
        """Compiles while generators start, unless they are to have the trainer's memory now."""
        if not (spec.sleep_level or spec.shares_memory):
            warm_up(self.policy.engine, spec.longest_sequence)

    @property
    def _problem(self) -> tuple[int, str] | None:
        return (dist.get_rank(), self.supervisor.problem) if self.supervisor.problem else None

    def welcome(self, spec: GeneratorSpec) -> Welcome:
        """What generators that join need."""
        return welcome_of(spec, self.policy.handle, self.tokenizer)

    def published_version(self) -> tuple[int, str] | None:
        """The version of the weights that were published last and its hash; None if they could not be published."""
        return self.supervisor.published

    def sync_weights(self, policy_version: int, needed: int | None) -> tuple[int, str] | None:
        """Gives generators the weights that the model has now. Those that sleep get them when they wake.

        Args:
            policy_version: the policy version of these weights.
            needed: number of the oldest published version that somebody still reads; None if there is none.
        """
        self.supervisor.load_weights(policy_version, needed)
        return self._problem

    def wake(self) -> tuple[int, str] | None:
        """Lets generators write, in memory that they share with the trainer."""
        self.supervisor.wake()
        return self._problem

    def sleep(self) -> str:
        """Lets generators give shared memory back. Returns a warning about memory, "" if there is none."""
        self.supervisor.sleep()
        return self.supervisor.offload.warning

    def restore(self) -> None:
        """Brings the trainer's weights back to the device."""
        self.supervisor.offload.restore()

    def write(self, requests: dict[int, list[Generate]]) -> None:
        """Lets generators that share their rank's process write completions, which go to the program as they come.

        Args:
            requests: those of each rank.
        """
        if own := requests.get(dist.get_rank()):
            self._relay.write(own)

    def restart(self, lost: dict[int, str], given_up: frozenset[int]) -> tuple[int, str] | None:
        """Starts generators again that have failed, with the weights that the model has now.

        Args:
            lost: why the program holds a generator for lost, by its rank.
            given_up: ranks whose generators are not started this time.
        """
        supervisor, rank = self.supervisor, dist.get_rank()
        supervisor.lose(supervisor.generator, lost.get(rank, ""))
        supervisor.restart(bool(supervisor.problem) and rank not in given_up)
        return self._problem
