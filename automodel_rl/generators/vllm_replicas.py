"""Several vLLM replicas on one device as a single generator.

vLLM schedules sequences and collects their tokens in one Python thread. For 512 sequences of a small model, that takes
five times as long as the device computes (benchmarks/rollouts.md). Replicas run in parallel.
"""

import functools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from automodel_rl.errors import InputError
from automodel_rl.generator_messages import Failure, Message, Request
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.generators.protocol import Completion, RankGenerator

WORKING_BYTES = 2 * 2**30
"""Memory of a replica besides weights, cache and logits: CUDA context, graphs and activations."""

BYTES_OF_LOGIT = 24
"""Bytes per vocabulary entry and sequence sampled at once: fp32 logits, their sorted copy and its indices."""

DEFAULT_MAX_NUM_SEQS = 1024
"""vLLM's default of max_num_seqs on a large GPU."""


def cache_bytes(share: float, weights: int, vocab_size: int, sampled_at_once: int = DEFAULT_MAX_NUM_SEQS) -> int:
    """Estimates the bytes of a replica's cache. vLLM's own measurement would include replicas that start on the same
    device at the same time.

    Args:
        share: bytes of device memory for the replica.
        weights: bytes of the model's weights.

    Raises:
        InputError: nothing is left for a cache.
    """
    others = weights + WORKING_BYTES + BYTES_OF_LOGIT * vocab_size * sampled_at_once
    if others >= share:
        raise InputError(
            f"rollout.generator.replicas: each vLLM has {share / 2**30:.1f} GiB, but weights, logits and graphs "
            f"take {others / 2**30:.1f} GiB: use fewer replicas or a larger memory_fraction"
        )
    return int(share - others)


class VllmReplicas(RankGenerator):
    """A `Generator`, and the `VllmChannel` of its weights. Each replica gets all messages and a part of the requests.

    Requests with the same prompt, and turns of a conversation, go to one replica, which has the prefix cached. The
    generator is lost if one replica is. `replicas` must not be started yet.
    """

    def __init__(self, replicas: Sequence[GeneratorProcess]):
        self.replicas = replicas
        self.warning = ""
        self.addresses: list[str] = []
        self._open = Counter[int]()  # unfinished requests of each replica
        self._of_conversations: dict[int, int] = {}
        self._counting = threading.Lock()

    @property
    def num_workers(self) -> int:
        """Number of processes that hold weights."""
        return sum(replica.num_workers for replica in self.replicas)

    def start(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Starts all replicas in parallel, calls `meanwhile`, and waits until all have started.

        Raises:
            NotStartedError: a replica does not start.
        """
        try:
            for replica in self.replicas:
                replica.ask_to_start()
            meanwhile()
            for replica in self.replicas:
                replica.wait_for_start()
        except BaseException:
            self.close()
            raise
        self.warning = self.replicas[0].warning

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        completions: dict[int, Future[Completion]] = {}
        for replica, indices in self._shares(requests).items():
            own = self.replicas[replica].submit([requests[index] for index in indices])
            for completion in own:
                completion.add_done_callback(functools.partial(self._count_done, replica))
            completions |= zip(indices, own, strict=True)
        return [completions[index] for index in range(len(requests))]

    def sleep(self, level: int, seconds: float) -> None:
        """Frees the memory of all replicas. See `GeneratorProcess.sleep`."""
        for replica in self.replicas:
            replica.sleep(level, seconds)

    def wake(self, what: Literal["weights", "kv_cache"], seconds: float) -> None:
        """Allocates the memory of all replicas again. See `GeneratorProcess.wake`."""
        for replica in self.replicas:
            replica.wake(what, seconds)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()

    def send(self, message: Message) -> None:
        for replica in self.replicas:
            replica.send(message)

    def ready(self) -> bool:
        return all(replica.ready() for replica in self.replicas)

    def receive(self) -> Message:
        answers = [replica.receive() for replica in self.replicas]
        return next((answer for answer in answers if isinstance(answer, Failure)), answers[0])

    def _shares(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """Returns the indices of requests by replica. New prompts go to the replica with the fewest unfinished
        requests."""
        shares: defaultdict[int, list[int]] = defaultdict(list)
        of_prompts: dict[tuple[int, ...], int] = {}
        with self._counting:
            for index, request in enumerate(requests):
                emptiest = min(range(len(self.replicas)), key=lambda number: self._open[number])
                if request.conversation is not None:
                    # Not by number, as in the fleet, which would leave replicas idle.
                    replica = self._of_conversations.setdefault(request.conversation, emptiest)
                else:
                    replica = of_prompts.setdefault(tuple(request.prompt), emptiest)
                shares[replica].append(index)
                self._open[replica] += 1
        return shares

    def _count_done(self, replica: int, _: "Future[Completion]") -> None:
        with self._counting:
            self._open[replica] -= 1
