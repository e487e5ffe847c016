"""A rank of a `PolicyGroup`: an actor with its part of the model, its engine, and possibly a generator."""

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray
import torch.distributed as dist

from automodel_rl.batch import Packing
from automodel_rl.config import RunConfig
from automodel_rl.estimate.decide import with_memory_decided
from automodel_rl.generators.fleet_rank import FleetRank
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.launch.failure import describe
from automodel_rl.launch.local import free_port
from automodel_rl.launch.watchdog import set_hang_limit
from automodel_rl.model.handle import ModelHandle
from automodel_rl.policy.crew import FLEET, POLICY, REFUSALS, RemoteCall
from automodel_rl.policy.policy_rank import PolicyRank
from automodel_rl.policy.shares import Share


@dataclass(frozen=True)
class RankLocation:
    """Machine and GPU of an actor.

    Attributes:
        port: a free port.
        device: number of its GPU; None without one.
    """

    host: str
    address: str
    port: int
    device: str | None


@dataclass(frozen=True)
class RankFacts:
    """Facts about a rank for the program.

    Attributes:
        data_rank: None for an outsider.
        packing: how rows become microbatches.
    """

    data_rank: int | None
    packing: Packing
    vocab_size: int


@dataclass(frozen=True)
class ActorFailure:
    """Answer of a failed rank. Some exceptions cannot be pickled, so they are not sent themselves.

    Attributes:
        text: what failed, in one line.
        refusal: an error that all ranks raise alike, leaving them unchanged; None for any other failure.
    """

    text: str
    refusal: Exception | None = None


class PolicyActor:
    """A rank. Its methods after `join` are collectives."""

    def answer(self, method: str, *arguments: Any) -> Any:
        """Calls a method. Returns its result, or an `ActorFailure`."""
        try:
            return getattr(self, method)(*arguments)
        except REFUSALS as error:
            return ActorFailure(str(error), error)
        except Exception as error:
            return ActorFailure(describe(error))

    def location(self) -> RankLocation:
        devices = [str(number) for number in ray.get_gpu_ids()]
        return RankLocation(
            socket.gethostname(), ray.util.get_node_ip_address(), free_port(), devices[0] if devices else None
        )

    def join(self, environment: dict[str, str], place: dict[str, str]) -> None:
        """Makes this actor a rank. Must precede any use of a device.

        Args:
            environment: the driver's variables, for those that this node lacks.
            place: variables that identify the rank.
        """
        os.environ.update({**environment, **os.environ, **place})

    def open(self, config: RunConfig) -> RankFacts:
        set_hang_limit(None)  # the program may wait arbitrarily long between calls
        model = OpenedModel.open(config.model)
        model.checked(config)
        config, decided = with_memory_decided(config, model)
        if decided and os.environ["RANK"] == "0":
            print(decided, flush=True)
        self.handle = ModelHandle.load(model, config.parallel, config.memory, config.components)
        tokenizer = model.tokenizer()
        policy = PolicyRank(self.handle, tokenizer, config.data.chat_template_kwargs)
        self.targets: dict[str, Any] = {POLICY: policy}
        if config.generation is not None:
            self.targets[FLEET] = FleetRank(policy, tokenizer)
        layout = self.handle.layout
        packing = Packing.of(config.batch, config.parallel, self.handle.flops)
        data_rank = None if layout.is_outsider else layout.data_rank
        return RankFacts(data_rank, packing, self.handle.config.vocab_size)

    def do(self, call: RemoteCall, share: Share | None) -> Any:
        """Calls a method of an object on this rank. Returns its result if this rank is to answer."""
        value = call.on(self.targets, share)
        return value if dist.get_rank() == 0 or call.is_gathered else None
