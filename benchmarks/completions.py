"""What it costs a program to get the completions of a large step from many generators.

    python benchmarks/completions.py 1 8 64

Generators are processes of this machine that write at once: 4 million tokens in completions of 2,048. So the time is
that of the way from relays to the fleet alone; with few processors it includes what the generators' ranks do.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from automodel_rl.generator_messages import Request, Sampling
from automodel_rl.generators.fleet import Fleet
from automodel_rl.generators.protocol import Completion, results
from automodel_rl.generators.relay import Relay
from automodel_rl.policy.crew import Crew, RemoteCall

TOKENS, LENGTH, PROMPT, TIMES = 4_000_000, 2048, 512, 3


class Instant:
    """Writes completions as soon as it is asked."""

    writes_in_background = True
    completion = Completion([7] * LENGTH, [-0.125] * LENGTH, "length", versions=(0, 0))

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        completions: list[Future[Completion]] = [Future() for _ in requests]
        for completion in completions:
            completion.set_result(self.completion)
        return completions


class Forked(Crew):
    """A crew whose ranks are forked when generators start."""

    def __init__(self, size: int):
        self.size, self.host, self.is_intact, self.signals = size, "localhost", True, []
        self.ranks: list[int] = []

    def call(self, call: RemoteCall, shares: Sequence[Any]) -> dict[int, Any]:
        if call.method != "start":
            return {}
        _, address = call.arguments
        for rank in range(self.size):
            self.ranks.append(os.fork())
            if not self.ranks[-1]:
                handle = SimpleNamespace(config=SimpleNamespace(vocab_size=10), router_shape=None)
                supervisor: Any = SimpleNamespace(
                    generator=Instant(), problem="", handle=handle, policy_versions=lambda versions: versions
                )
                Relay(rank, supervisor, None, address)  # type: ignore[arg-type]
                while os.getppid() != 1:
                    time.sleep(0.2)
        return {rank: (rank, True) for rank in range(self.size)}


def main() -> None:
    for size in map(int, sys.argv[1:] or ["1"]):
        crew = Forked(size)
        fleet = Fleet(crew)
        fleet.start(SimpleNamespace(shares_memory=False))  # type: ignore[arg-type]
        requests = [Request([1] * PROMPT, seed, Sampling(LENGTH)) for seed in range(TOKENS // LENGTH)]
        before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
        for _ in range(TIMES):
            started = time.perf_counter()
            completions = results(fleet.submit(requests))
            seconds.append(time.perf_counter() - started)
            assert len(completions) == len(requests)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        row = {"generators": size, "completions": len(requests), "seconds": round(sorted(seconds)[TIMES // 2], 3)}
        print(json.dumps(row | {"memory_more_mib": more // 1024}), flush=True)
        for rank in crew.ranks:
            os.kill(rank, 9)
            os.waitpid(rank, 0)


if __name__ == "__main__":
    main()
