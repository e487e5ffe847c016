"""Several vLLM engines on one device as a single generator.

vLLM schedules sequences and takes their tokens in one Python thread: for 512 sequences of a small model that takes five
times as long as the device computes (benchmarks/README.md, "Several engines on a device"). Engines do it side by side.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

from automodel_rl.generator_messages import Failure, Message, Request
from automodel_rl.generators.generator_process import GeneratorProcess
from automodel_rl.generators.protocol import Completion, OnFinished, OnLost, do_nothing, not_told


class VllmEngines:
    """A `Generator`, and the `VllmChannel` of its weights: each engine gets the same messages, and a part of the
    requests. Requests with the same prompt, and turns of a conversation, go to one engine, which has their beginning
    cached. If one engine is lost, the generator is.

    Args:
        engines: the engines, not started yet.
    """

    def __init__(self, engines: Sequence[GeneratorProcess]):
        self.engines = engines
        self.works_alone, self.warning = True, ""
        self.addresses: list[str] = []
        self._open = Counter[int]()  # number of requests that each engine still writes
        self._counting = threading.Lock()

    @property
    def num_workers(self) -> int:
        """Number of processes that hold weights."""
        return sum(engine.num_workers for engine in self.engines)

    def start(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Starts one engine after the other, since each measures the memory that is free.

        Args:
            meanwhile: called while the first one starts. What it raises, this raises.

        Raises:
            NotStartedError: an engine does not start.
        """
        try:
            for number, engine in enumerate(self.engines):
                engine.start(*([meanwhile] if number == 0 else []))
        except BaseException:
            self.close()
            raise
        self.warning = self.engines[0].warning

    def submit(
        self, requests: Sequence[Request], on_finished: OnFinished = do_nothing, on_lost: OnLost = not_told
    ) -> Callable[[], list[Completion]]:
        told = threading.Lock()

        def tell_once(error: BaseException) -> None:
            if told.acquire(blocking=False):
                on_lost(error)

        shares = self._shares(requests)
        waits = {
            engine: self._submit(engine, [requests[place] for place in places], places, on_finished, tell_once)
            for engine, places in shares.items()
        }

        def completions() -> list[Completion]:
            found: dict[int, Completion] = {}
            for engine, places in shares.items():
                found |= dict(zip(places, waits[engine](), strict=True))
            return [found[place] for place in range(len(requests))]

        return completions

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.submit(requests)()

    def sleep(self, level: int, seconds: float) -> None:
        """Makes all engines give their memory back. Arguments and errors are those of `GeneratorProcess.sleep`."""
        for engine in self.engines:
            engine.sleep(level, seconds)

    def wake(self, what: Literal["weights", "kv_cache"], seconds: float) -> None:
        """Gives all engines their memory again. Arguments and errors are those of `GeneratorProcess.wake`."""
        for engine in self.engines:
            engine.wake(what, seconds)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def send(self, message: Message) -> None:
        for engine in self.engines:
            engine.send(message)

    def ready(self) -> bool:
        return all(engine.ready() for engine in self.engines)

    def receive(self) -> Message:
        answers = [engine.receive() for engine in self.engines]
        return next((answer for answer in answers if isinstance(answer, Failure)), answers[0])

    def _shares(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """Places of the requests that each engine gets. Prompts go where the fewest requests are."""
        shares: defaultdict[int, list[int]] = defaultdict(list)
        of_prompts: dict[tuple[int, ...], int] = {}
        with self._counting:
            for place, request in enumerate(requests):
                if request.conversation is not None:
                    engine = request.conversation % len(self.engines)
                else:
                    emptiest = min(range(len(self.engines)), key=lambda number: self._open[number])
                    engine = of_prompts.setdefault(tuple(request.prompt), emptiest)
                shares[engine].append(place)
                self._open[engine] += 1
        return shares

    def _submit(
        self, engine: int, requests: list[Request], places: list[int], on_finished: OnFinished, on_lost: OnLost
    ) -> Callable[[], list[Completion]]:
        def finish(place: int, completion: Completion) -> None:
            with self._counting:
                self._open[engine] -= 1
            on_finished(places[place], completion)

        return self.engines[engine].submit(requests, finish, on_lost)
