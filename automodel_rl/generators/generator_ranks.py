"""Assignment of generators to ranks. Other ranks only train, or lend their GPUs to a vLLM that another rank leads."""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch.distributed as dist

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import JoinedGeneratorConfig, VllmGeneratorConfig, VllmServersConfig
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Answer, Call, Committed, Message, Request, unknown
from automodel_rl.generators.protocol import Completion, RankGenerator
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import own_group


@dataclass(frozen=True)
class GeneratorRanks:
    """The ranks that lead generators.

    Attributes:
        size: number of GPUs of each generator.
        group: gloo group of the consecutive ranks whose GPUs this rank's generator shares; None if it uses one rank's
            GPU, or GPUs of its own.
    """

    leaders: tuple[int, ...]
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, spec: GeneratorSpec) -> "GeneratorRanks":
        """Assigns generators to ranks. A collective of all ranks.

        Raises:
            InputError: the number of ranks or GPUs of a machine does not fit the generators.
        """
        if isinstance(spec.choice, VllmServersConfig):
            return cls((0,))
        if isinstance(spec.choice, JoinedGeneratorConfig):
            return cls(())
        size, devices = spec.tensor_parallel, spec.choice.devices
        world = dist.get_world_size()
        on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if devices and isinstance(spec.choice, VllmGeneratorConfig):
            led = _led_on(devices, size, on_machine)
            return cls(tuple(rank for rank in range(world) if rank % on_machine < led), size)
        if size == 1:
            return cls(tuple(range(world)))
        if on_machine % size:
            raise InputError(
                f"rollout.generator.tensor_parallel={size}: does not divide the {on_machine} ranks on a machine: "
                "use a divisor"
            )
        groups = [[*range(first, first + size)] for first in range(0, world, size)]
        return cls(tuple(range(0, world, size)), size, own_group(groups, "gloo"))

    @property
    def is_leader(self) -> bool:
        """Whether this rank leads a generator."""
        return dist.get_rank() in self.leaders

    def barrier(self) -> None:
        """Waits for the other ranks of the same generator."""
        if self.group is not None:
            gather_objects(None, self.group)


def _led_on(devices: Sequence[int], size: int, num_ranks: int) -> int:
    """Number of generators on a machine that have GPUs of their own. The first ranks lead one each."""
    led, over = divmod(len(devices), size)
    if over or not 0 < led <= num_ranks:
        raise InputError(
            f"rollout.generator.place={list(devices)} with tensor_parallel={size}: each vLLM takes {size} devices "
            f"and one of the {num_ranks} ranks on a machine: list {size} for each of at most {num_ranks} vLLM"
        )
    return led


class NoGenerator(RankGenerator):
    """Stand-in on ranks without a generator. Answers weight-sync calls with success, so that all ranks run the same
    loop."""

    num_workers = 0

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._pending_version: int | None = None
        self._answers: deque[Message] = deque()

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        assert not requests
        return []

    def close(self) -> None:
        """Does nothing: no process was started."""

    def send(self, message: Message) -> None:
        match message:
            case Call("begin", (version, _)):
                self._pending_version = version
            case Call("abort"):
                self._answers.clear()
            case Call("commit"):
                self._answers.append(Answer("commit", Committed(self._pending_version)))
            case Call("load_adapter", (version, _)):
                self._answers.append(Answer("load_adapter", Committed(version)))
            case Call("init_transfer" | "load_weights" as verb):
                self._answers.append(Answer(verb))
            case _:
                raise unknown(message)

    def ready(self) -> bool:
        return bool(self._answers)

    def receive(self) -> Message:
        return self._answers.popleft()
