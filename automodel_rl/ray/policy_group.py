"""A policy on a Ray cluster, which a program trains that needs no GPU itself."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from torch import Tensor

from automodel_rl.batch import TokenSequence
from automodel_rl.config import RayConfig, RunConfig
from automodel_rl.engine import TrainOutput
from automodel_rl.engine.engine import LOGPROBS
from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Request
from automodel_rl.generators.protocol import Completion
from automodel_rl.losses import LossFn, Readout
from automodel_rl.ray.cluster import Nodes, connected, device_order, environment_for_nodes, reserved
from automodel_rl.ray.policy_rank import Failure, PolicyRank, RankPlace

KEEP_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Lets an actor see all GPUs of its node, so that all ranks number them alike."""


GRACE_SECONDS = 30.0
"""Longest wait for the other ranks once one has refused its input, and for ranks that are to close."""


class PolicyLostError(Exception):
    """A rank of the group failed or is gone, and with it the group."""


class PolicyGroup:
    """A model in training on a Ray cluster, one actor for each rank. A context manager.

    Its methods take global batches: lists of sequences, which the ranks pack and share. Trained weights stay on the
    ranks. The cluster is that of `launch.ray`; without it, that of this machine.

    Args:
        config: the config of a run, of which `model`, `parallel`, `memory`, `optimizer`, `batch` and `launch` count;
            with grpo also `rollout` and `weight_sync`: then generators run beside the ranks.
        total_steps: number of optimizer steps; needed if the learning rate decays.

    Raises:
        InputError: the config does not fit the model or the cluster.
    """

    def __init__(self, config: RunConfig, total_steps: int | None = None):
        settings = config.launch.ray or RayConfig()
        if config.batch.microbatch_tokens == "auto":
            raise InputError("batch.microbatch_tokens=auto: a PolicyGroup takes no measurements: give a number")
        self.config = config
        self._ranks: list[Any] = []
        self._stack = contextlib.ExitStack()
        try:
            if not ray.is_initialized():
                self._stack.enter_context(connected(settings.address))
            if config.generation is not None and config.generation.rollout.generator.devices:
                raise InputError("rollout.generator.place: no devices with a PolicyGroup: use shared, or servers")
            nodes = self._stack.enter_context(reserved(settings, config.world_size))
            self._start(nodes)
            self._ask("open", config, total_steps)
        except BaseException:
            self._stack.close()
            raise

    def train_step(
        self, sequences: Sequence[TokenSequence], loss_fn: LossFn, readout: Readout = LOGPROBS
    ) -> TrainOutput:
        """Takes one optimizer step over a global batch. Arguments and errors are those of `Engine.train_step`."""
        return self._ask("train_step", self._put(sequences), loss_fn, readout)[0]

    def forward_backward(
        self, sequences: Sequence[TokenSequence], loss_fn: LossFn, readout: Readout = LOGPROBS
    ) -> float:
        """Adds the gradients of a global batch to those that are there, and returns the loss."""
        return self._ask("forward_backward", self._put(sequences), loss_fn, readout)[0]

    def optimizer_step(self) -> TrainOutput:
        """Takes one optimizer step with the gradients that `forward_backward` has added up."""
        return self._ask("optimizer_step")[0]

    def logprobs(self, sequences: Sequence[TokenSequence], temperature: float = 1.0) -> list[Tensor]:
        """The log-probability of each token of each sequence of n tokens, [n], fp32 or float64; its first entry is 0.

        Args:
            sequences: the sequences.
            temperature: the logits are divided by it.
        """
        return _in_order(self._ask("logprobs", self._put(sequences), temperature), len(sequences))

    def sync_weights(self) -> int:
        """Gives the generators the weights that the model has now. Returns the policy version that this makes, from 2
        on: generators begin with the first one."""
        self._check_generators()
        return self._ask("sync_weights")[0]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions by the generators, which have the weights of the last `sync_weights`."""
        self._check_generators()
        return _in_order(self._ask("generate", self._put(requests)), len(requests))

    def save(self, path: str | Path) -> None:
        """Writes a Hugging Face checkpoint with its tokenizer; of adapters, PEFT's files.

        Args:
            path: the folder to write, on a file system that all nodes share.
        """
        self._ask("save", Path(path).absolute())

    def close(self) -> None:
        """Ends the ranks and gives their nodes back. A call that they are busy with is not waited for long."""
        try:
            if self._ranks:
                ray.wait(self._answers("close"), num_returns=len(self._ranks), timeout=GRACE_SECONDS)
        finally:
            self._ranks = []
            self._stack.close()

    def __enter__(self) -> "PolicyGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_generators(self) -> None:
        if self.config.generation is None:
            raise InputError(f"a {type(self.config).__name__} has no generators: give a GRPOConfig")

    def _start(self, nodes: Nodes) -> None:
        per_node = nodes.ranks_per_node
        kind = ray.remote(PolicyRank)
        environment = {"env_vars": KEEP_DEVICES}
        actors = [
            kind.options(**nodes.options(node, per_node), runtime_env=environment).remote()
            for node in range(nodes.count)
            for _ in range(per_node)
        ]
        self._ranks = actors
        places: list[RankPlace] = self._ask("place")
        # GPUs are given out in any order, and neighbours in rank should be neighbours in hardware.
        order = sorted(
            range(len(actors)), key=lambda place: (place // per_node, device_order(places[place].device or "0"))
        )
        self._ranks, places = [actors[place] for place in order], [places[place] for place in order]
        meeting = {
            "WORLD_SIZE": str(len(actors)),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": places[0].address,
            "MASTER_PORT": str(places[0].port),
        }
        joined: list[Any] = []
        for rank, actor in enumerate(self._ranks):
            of_node = places[rank // per_node * per_node :][:per_node]
            devices = ",".join(place.device for place in of_node if place.device is not None)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node)}
            own |= {"CUDA_VISIBLE_DEVICES": devices} if devices else {}
            joined.append(actor.join.remote(environment_for_nodes(), meeting | own))
        ray.get(joined)

    def _put(self, value: Any) -> Any:
        """A value that all ranks read from one place."""
        self._check_open()
        return ray.put(value)

    def _check_open(self) -> None:
        if not self._ranks:
            raise PolicyLostError("the group is closed")

    def _answers(self, method: str, *arguments: Any) -> list[Any]:
        return [actor.answer.remote(method, *arguments) for actor in self._ranks]

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, in their order. A failure ends the group, unless it is a refusal of all ranks."""
        self._check_open()
        futures = self._answers(method, *arguments)
        waiting, refusal = [*futures], None
        while waiting:  # ranks that wait for one that failed do not answer
            done, waiting = ray.wait(waiting, timeout=None if refusal is None else GRACE_SECONDS)
            try:
                failures = [answer for answer in ray.get(done) if isinstance(answer, Failure)]
            except RayError as error:
                failures = [Failure(f"a node or its actor is gone: {' '.join(str(error).split())[:300]}", False)]
            if not done:
                failures = [Failure("only some ranks refused their input: " + str(refusal), False)]
            for failure in failures:
                if not failure.is_refusal:
                    self._ranks = []
                    self._stack.close()
                    raise PolicyLostError(f"the group has ended, for a rank failed: {failure.text}")
                refusal = failure.text
        if refusal is not None:
            raise InputError(refusal)
        return ray.get(futures)


def _in_order(answers: Sequence[dict[int, Any]], count: int) -> list[Any]:
    everywhere = {place: value for answer in answers for place, value in answer.items()}
    return [everywhere[place] for place in range(count)]
