"""Conversations of several turns with vLLM: how busy it is while environments work, and what it computes again.

    python benchmarks/conversations.py --vllm-python PYTHON
    python benchmarks/conversations.py --tiny               check the script on a CPU, with transformers' generator

A dense 1.5B model with random weights (W1). Conversations of four turns, each of about 128 tokens (a token of 1 in 128
ends a turn), answered with 64 tokens by an environment that takes 50 ms, in processes of its own. Prints one line for
all conversations driven on their own, and one for rounds in which all turns are written before any is answered.
"""

import argparse
import functools
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from workload import TINY, WORKLOADS, write_model

from automodel_rl.generator_messages import Request, Sampling, VllmSettings
from automodel_rl.generators.protocol import Completion, RankGenerator, results
from automodel_rl.generators.vllm_process import start_vllm
from automodel_rl.rollout.episodes.driver import EpisodeDriver
from automodel_rl.rollout.episodes.environment_pool import EnvironmentPool
from automodel_rl.rollout.episodes.environment_server import Setup
from automodel_rl.rollout.episodes.episode import Episode, Limits
from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn

TURNS, TURN_TOKENS, ANSWER_TOKENS, PROMPT_TOKENS = 4, 512, 64, 200


class Slow:
    """An environment that takes its time."""

    def __init__(self, example: dict, seed: int):
        self.seconds = example["seconds"]

    def reset(self) -> Sequence[Message]:
        return ()

    def step(self, turn: Turn) -> Outcome:
        time.sleep(self.seconds)
        return Outcome([{"role": "user", "content": "more"}])

    def close(self) -> None: ...


class Codec:
    """Answers of random tokens, whatever the turn."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        raise NotImplementedError("environments here begin with nothing")

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Turn:
        return Turn("")

    def suffix(self, messages: Sequence[Message], turn: Turn, stop: int) -> list[int]:
        return torch.randint(self.vocab_size, (ANSWER_TOKENS,)).tolist()


class Watched(RankGenerator):
    """A generator, and how long it had something to write.

    Attributes:
        busy: seconds with at least one request.
        request_seconds: seconds of all requests, from when one is asked for until it is written.
        cached, asked: tokens of prompts after first turns that were not computed again, and all of them.
    """

    def __init__(self, inner: RankGenerator):
        self.inner, self.lock = inner, threading.Lock()
        self.open, self.busy, self.request_seconds, self.since = 0, 0.0, 0.0, 0.0
        self.turns = self.cached = self.asked = 0

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        self._add(len(requests))
        completions = self.inner.submit(requests)
        for request, completion in zip(requests, completions, strict=True):
            completion.add_done_callback(functools.partial(self._finish, request))
        return completions

    def _finish(self, request: Request, done: "Future[Completion]") -> None:
        self._add(-1)
        self.turns += 1
        cached = done.result().num_cached
        if len(request.prompt) > PROMPT_TOKENS and cached is not None:
            self.cached += cached
            self.asked += len(request.prompt)

    def close(self) -> None:
        self.inner.close()

    def _add(self, count: int) -> None:
        with self.lock:
            now = time.perf_counter()
            if self.open:
                self.busy += now - self.since
                self.request_seconds += self.open * (now - self.since)
            self.open, self.since = self.open + count, now


class InRounds(Watched):
    """The same, as a generator whose turns are waited for all together."""

    writes_in_background = False

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        held: list[Future[Completion]] = [Future() for _ in requests]

        def pass_on() -> None:
            for completion, written in zip(held, results(super(InRounds, self).submit(requests)), strict=True):
                completion.set_result(written)

        threading.Thread(target=pass_on).start()
        return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python")
    parser.add_argument("--conversations", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.05, help="of a step of the environment")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / f"automodel_rl_conversations{'_tiny' if options.tiny else ''}"
    sizes = WORKLOADS["W1"] | (TINY if options.tiny else {})
    if not (folder / "config.json").is_file():
        write_model(folder, sizes)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    setup = Setup("conversations:Slow", (), 30.0, "auto", str(folder / "environments.log"))
    pool = EnvironmentPool(setup, ends_on_bad_call=False)
    generator = _tiny_generator(folder) if options.tiny else _vllm(folder, options.vllm_python, vocab_size)
    try:
        for kind in (Watched, InRounds, Watched, InRounds)[: 2 if options.tiny else 4]:
            for repetition in range(options.rounds):
                print(json.dumps(measure(kind, repetition, generator, pool, vocab_size, options)), flush=True)
    finally:
        generator.close()
        pool.close()


def measure(
    kind: type[Watched],
    repetition: int,
    generator: RankGenerator,
    pool: EnvironmentPool,
    vocab_size: int,
    options: argparse.Namespace,
) -> dict[str, float | str]:
    watched, codec = kind(generator), Codec(vocab_size)
    limits = Limits(PROMPT_TOKENS, TURNS, TURNS * (TURN_TOKENS + ANSWER_TOKENS), TURN_TOKENS)
    torch.manual_seed(repetition)
    episodes = [
        Episode(
            Request(
                torch.randint(vocab_size, (PROMPT_TOKENS,)).tolist(), 1000 * repetition + number, Sampling(TURN_TOKENS)
            ),
            [],
            pool.open({"seconds": options.seconds, "messages": []}, 0),
            codec,
            limits,
        )
        for number in range(options.conversations)
    ]
    driver = EpisodeDriver(options.conversations)
    began = time.perf_counter()
    completions = results(driver.submit(watched, episodes))
    seconds = time.perf_counter() - began
    driver.close()
    sampled = sum(completion.sampled.count(True) for completion in completions)
    return {
        "driven": "on their own" if kind is Watched else "in rounds",
        "seconds": round(seconds, 2),
        "busy": round(watched.busy / seconds, 3),
        "in_flight": round(watched.request_seconds / seconds, 1),
        "turns": watched.turns,
        "sampled_tokens_per_second": round(sampled / seconds),
        "cached": round(watched.cached / max(1, watched.asked), 3),
        "errors": sum(completion.finish == "error" for completion in completions),
    }


def _vllm(folder: Path, python: str | None, vocab_size: int) -> RankGenerator:
    options = {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": PROMPT_TOKENS + TURNS * (TURN_TOKENS + ANSWER_TOKENS),
        "gpu_memory_utilization": 0.5,
        "skip_tokenizer_init": True,
        "max_num_seqs": 256,
    }
    ends = tuple(range(0, vocab_size, 128))
    return start_vllm(python, VllmSettings(options, ends))


def _tiny_generator(folder: Path) -> RankGenerator:
    class Ends(RankGenerator):
        """Writes three tokens."""

        def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
            completions: list[Future[Completion]] = [Future() for _ in requests]

            def write() -> None:
                for completion in completions:
                    time.sleep(0.002)
                    completion.set_result(Completion([1, 2, 0], [-1.0, -1.0, -1.0], "stop", num_cached=0))

            threading.Thread(target=write).start()
            return completions

        def close(self) -> None: ...

    return Ends()


if __name__ == "__main__":
    main()
