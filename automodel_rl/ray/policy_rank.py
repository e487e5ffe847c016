"""A rank of a `PolicyGroup`: an actor with its part of the model, its engine, and perhaps a generator."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import Microbatch, TokenSequence
from automodel_rl.config import RunConfig
from automodel_rl.data.ends import new_ends
from automodel_rl.data.loader import pack_step
from automodel_rl.engine import Engine, TrainOutput
from automodel_rl.errors import InputError, RolloutError
from automodel_rl.estimate.decide import with_memory_decided
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.supervisor import GeneratorSupervisor
from automodel_rl.hf.opened_model import OpenedModel
from automodel_rl.launch.failure import describe
from automodel_rl.launch.local import free_port
from automodel_rl.launch.watchdog import set_hang_limit
from automodel_rl.losses import LossFn, Readout
from automodel_rl.model.handle import ModelHandle


@dataclass(frozen=True)
class RankPlace:
    """The machine and GPU of an actor.

    Attributes:
        host: name of its machine.
        address: IP address of its machine.
        port: a port that is free there.
        device: the number of its GPU; None without one.
    """

    host: str
    address: str
    port: int
    device: str | None


@dataclass(frozen=True)
class Failure:
    """What a rank answers if it fails. An exception itself may not survive the way to the driver.

    Attributes:
        text: what failed, in one line.
        is_refusal: whether all ranks refuse their input alike, and are as they were.
    """

    text: str
    is_refusal: bool


class PolicyRank:
    """A rank. Its methods after `join` are collectives: the group calls each on all ranks."""

    def answer(self, method: str, *arguments: Any) -> Any:
        """What a method returns, or a `Failure`."""
        try:
            return getattr(self, method)(*arguments)
        except InputError as error:
            return Failure(str(error), is_refusal=True)
        except Exception as error:
            return Failure(describe(error), is_refusal=False)

    def place(self) -> RankPlace:
        devices = [str(number) for number in ray.get_gpu_ids()]
        return RankPlace(
            socket.gethostname(), ray.util.get_node_ip_address(), free_port(), devices[0] if devices else None
        )

    def join(self, environment: dict[str, str], place: dict[str, str]) -> None:
        """Takes its place among the ranks. Comes before anything that needs a device.

        Args:
            environment: variables of the driver, for those that this node lacks.
            place: variables that say which rank it is.
        """
        os.environ.update({**environment, **os.environ, **place})

    def open(self, config: RunConfig, total_steps: int | None) -> None:
        """Loads the model and, where the run generates, starts the generators."""
        set_hang_limit(None)  # the program may take its time between two calls
        model = OpenedModel.open(config.model)
        model.checked(config)
        self.config, decided = with_memory_decided(config, model)
        config = self.config
        if decided and dist.get_rank() == 0:
            print(decided, flush=True)
        self.handle = ModelHandle.load(model, config.parallel, config.memory, config.components)
        self.engine = Engine(self.handle, config.optimizer, total_steps)
        self.tokenizer = model.tokenizer()
        self.supervisor: GeneratorSupervisor | None = None
        if config.generation is not None:
            self.supervisor = GeneratorSupervisor(config.generation.generator_spec, self.engine, self.tokenizer)
            self.supervisor.load_weights()

    def train_step(self, sequences: Sequence[TokenSequence], loss_fn: LossFn, readout: Readout) -> TrainOutput:
        return self.engine.train_step(self._pack(sequences), loss_fn, readout)

    def forward_backward(self, sequences: Sequence[TokenSequence], loss_fn: LossFn, readout: Readout) -> float:
        return self.engine.forward_backward(self._pack(sequences), loss_fn, readout)[0]

    def optimizer_step(self) -> TrainOutput:
        return self.engine.optimizer_step()

    def logprobs(self, sequences: Sequence[TokenSequence], temperature: float) -> dict[int, Tensor]:
        """Log-probabilities of this data rank's sequences by their places, from one rank of each data rank."""
        microbatches = self._pack(sequences)
        found = self.engine.logprobs(microbatches, temperature)
        if not self.handle.layout.is_first_of_data_rank:
            return {}
        places = [place for microbatch in microbatches for place in microbatch.order]
        return {place: values.cpu() for place, values in zip(places, found, strict=True)}

    def sync_weights(self) -> int:
        """Gives the generators the weights that the model has now. Returns the policy version that this makes."""
        assert self.supervisor is not None
        self.supervisor.load_weights()
        return self.supervisor.policy_version

    def generate(self, requests: Sequence[Request]) -> dict[int, Completion]:
        """Completions of this rank's share of requests, by their places."""
        assert self.supervisor is not None
        self.supervisor.wake()
        own = self.supervisor.ranks.deal(len(requests))[int(os.environ["RANK"])]
        generator = self.supervisor.generator
        if self.supervisor.problem or generator is None:
            raise RolloutError(f"the generator of rank {os.environ['RANK']} cannot write: {self.supervisor.problem}")
        written = generator.submit([requests[place] for place in own])() if own else []
        self.supervisor.rest()
        return dict(zip(own, written, strict=True))

    def save(self, path: Path) -> None:
        handle, is_adapters = self.handle, self.handle.adapter_origin is not None
        ends = new_ends(handle.source, handle.whole_config, self.tokenizer, adapters=is_adapters)
        if ends.note and os.environ["RANK"] == "0":
            print(f"{path}: {ends.note}", flush=True)
        handle.save_pretrained(path, self.tokenizer, ends.ids)

    def close(self) -> None:
        if self.supervisor is not None:
            self.supervisor.close()

    def _pack(self, sequences: Sequence[TokenSequence]) -> list[Microbatch]:
        return pack_step(sequences, self.config.batch, self.handle.layout, self.handle.flops).microbatches
