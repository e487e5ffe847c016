"""Several vLLM replicas on one device as a single generator.

vLLM schedules sequences and takes their tokens in one Python thread: for 512 sequences of a small model that takes five
times as long as the device computes (benchmarks/README.md, "Several vLLM on a device"). Replicas do it side by side.
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
"""Memory of a vLLM for what is neither weights, cache nor logits: its CUDA context, graphs and activations."""

BYTES_OF_LOGIT = 24
"""Bytes for each token of the vocabulary and sequence that is sampled at once: logits in fp32, sorted, with places."""

SAMPLED_AT_ONCE = 1024
"""Most sequences that vLLM samples at once on a large GPU, unless its option max_num_seqs says otherwise."""


def cache_bytes(share: float, weights: int, vocab_size: int, sampled_at_once: int = SAMPLED_AT_ONCE) -> int:
    """Bytes of a replica's cache. Alone, vLLM measures what it needs besides; what starts at the same time on the same
    device would be measured with it.

    Args:
        share: bytes of the device's memory for the replica.
        weights: bytes of the model's weights.
        vocab_size: size of the model's vocabulary.
        sampled_at_once: most sequences that are sampled at once.

    Raises:
        InputError: nothing is left for a cache.
    """
    others = weights + WORKING_BYTES + BYTES_OF_LOGIT * vocab_size * sampled_at_once
    if others >= share:
        raise InputError(
            f"rollout.generator.replicas: each vLLM has {share / 2**30:.1f} GiB, of which weights, logits and graphs "
            f"take {others / 2**30:.1f}: use fewer replicas or a larger memory_fraction"
        )
    return int(share - others)


class VllmReplicas(RankGenerator):
    """A `Generator`, and the `VllmChannel` of its weights: each replica gets the same messages, and a part of the
    requests. Requests with the same prompt, and turns of a conversation, go to one replica, which has their beginning
    cached. If one replica is lost, the generator is.

    Args:
        replicas: the replicas, not started yet.
    """

    def __init__(self, replicas: Sequence[GeneratorProcess]):
        self.replicas = replicas
        self.warning = ""
        self.addresses: list[str] = []
        self._open = Counter[int]()  # number of requests that each replica still writes
        self._of_conversations: dict[int, int] = {}
        self._counting = threading.Lock()

    @property
    def num_workers(self) -> int:
        """Number of processes that hold weights."""
        return sum(replica.num_workers for replica in self.replicas)

    def start(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Starts all replicas at the same time, and waits until they have started.

        Args:
            meanwhile: called before the wait. What it raises, this raises.

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
        for replica, places in self._shares(requests).items():
            own = self.replicas[replica].submit([requests[place] for place in places])
            for completion in own:
                completion.add_done_callback(functools.partial(self._count_done, replica))
            completions |= zip(places, own, strict=True)
        return [completions[place] for place in range(len(requests))]

    def sleep(self, level: int, seconds: float) -> None:
        """Makes all replicas give their memory back. Arguments and errors are those of `GeneratorProcess.sleep`."""
        for replica in self.replicas:
            replica.sleep(level, seconds)

    def wake(self, what: Literal["weights", "kv_cache"], seconds: float) -> None:
        """Gives all replicas their memory again. Arguments and errors are those of `GeneratorProcess.wake`."""
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
        """Places of the requests that each replica gets. Prompts go where the fewest requests are."""
        shares: defaultdict[int, list[int]] = defaultdict(list)
        of_prompts: dict[tuple[int, ...], int] = {}
        with self._counting:
            for place, request in enumerate(requests):
                emptiest = min(range(len(self.replicas)), key=lambda number: self._open[number])
                if request.conversation is not None:
                    # The fleet deals conversations by their number: the same here would leave replicas idle.
                    replica = self._of_conversations.setdefault(request.conversation, emptiest)
                else:
                    replica = of_prompts.setdefault(tuple(request.prompt), emptiest)
                shares[replica].append(place)
                self._open[replica] += 1
        return shares

    def _count_done(self, replica: int, _: "Future[Completion]") -> None:
        with self._counting:
            self._open[replica] -= 1
