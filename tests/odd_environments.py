"""Environments for tests: one that plays by the rules, and some that do not. Imports nothing heavy."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn


class Counting:
    """Answers each turn with its number, and ends after two. It rewards every vowel."""

    def __init__(self, example: dict[str, Any], seed: int):
        self.example, self.seed, self.turns = example, seed, 0

    def reset(self) -> Sequence[Message]:
        return ()

    def step(self, turn: Turn) -> Outcome:
        self.turns += 1
        vowels = sum(letter in "aeiou" for letter in turn.text)
        answer = [{"role": "user", "content": f"{self.turns}, and now?"}]
        return Outcome(answer, done=self.turns == 2, reward=vowels, metrics={"vowels": vowels})

    def close(self) -> None: ...


class Greeting(Counting):
    """Begins with a message that depends on the seed."""

    def reset(self) -> Sequence[Message]:
        return [{"role": "user", "content": f" Say {self.seed % 10}."}]


def _raise() -> None:
    raise ValueError("the world has ended")


def _hang() -> None:
    while True:
        time.sleep(1.0)


def _hold_on() -> None:
    """Hangs where no signal but the last ends it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _hang()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    os._exit(3)


def _flood() -> None:
    for _ in range(64):
        sys.stdout.write("x" * 2**20)
        sys.stdout.flush()


def _fork() -> None:
    """Leaves processes behind: children, and one in a session of its own whose parent is gone."""
    for _ in range(3):
        if not os.fork():
            _hang()
    if not os.fork():
        os.setsid()
        if not os.fork():
            _hang()
        os._exit(0)


def _spawn() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True)


TRICKS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "hang": _hang,
    "hold on": _hold_on,
    "die": _die,
    "leave": _leave,
    "flood": _flood,
    "fork": _fork,
    "spawn": _spawn,
}

RESULTS: dict[str, Any] = {
    "nothing": None,
    "a text": "done",
    "nan": Outcome(reward=float("nan")),
    "a role": Outcome([{"role": "assistant", "content": "I am you"}]),
    "no text": Outcome([{"role": "user", "content": 3}]),
    "too long": Outcome([{"role": "user", "content": "x" * 2_000_000}]),
}


class Odd(Counting):
    """Plays a trick, or returns something odd, at a place that the example names: make, reset, step or close."""

    def __init__(self, example: dict[str, Any], seed: int):
        super().__init__(example, seed)
        self._play("make")

    def reset(self) -> Sequence[Message]:
        self._play("reset")
        return ()

    def step(self, turn: Turn) -> Outcome:
        self._play("step")
        return RESULTS[self.example["returns"]] if self.example.get("returns") else super().step(turn)

    def close(self) -> None:
        self._play("close")

    def _play(self, place: str) -> None:
        if self.example.get("place") == place:
            TRICKS[self.example["trick"]]()


def fuzzed(example: dict[str, Any], seed: int) -> Counting:
    """An environment of which one in four is odd, drawn by the seed."""
    random_ = random.Random(seed)
    if random_.random() < 0.75:
        return Counting(example, seed)
    place = random_.choice(["make", "reset", "step", "close"])
    odd = {"place": place, "trick": random_.choice([*TRICKS])}
    return Odd(odd if random_.random() < 0.7 else {"returns": random_.choice([*RESULTS])}, seed)
