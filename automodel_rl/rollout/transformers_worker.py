"""The process of a transformers engine of its own: it generates, and takes weights between two tokens.

python -m automodel_rl.rollout.transformers_worker DESCRIPTOR

Messages over the connection of that descriptor:

    ("start", arguments of TransformersEngine)               -> ("started",)
    ("generate", number, [(prompt, seed, temperature), ...])
        -> ("completions", number, [(token_ids, logprobs, finish, oldest version, newest version, routes), ...])
    those of weight_sync/channel.py

("error", text) may take the place of the first answer, and ("failed", number, text) of completions.
"""

import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from automodel_rl.errors import innermost
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.rollout.protocol import Completion, Request
from automodel_rl.rollout.transformers_engine import TransformersEngine
from automodel_rl.weight_sync.channel import Message
from automodel_rl.weight_sync.engine_end import EngineEnd


def main() -> None:
    quiet_libraries()
    connection = Connection(int(sys.argv[-1]))
    _, arguments = connection.recv()
    try:
        engine = TransformersEngine(**arguments)
    except Exception as error:
        connection.send(("error", innermost(error)))
        return
    connection.send(("started",))
    Worker(engine, connection).run()


class Worker:
    """Takes turns between completions and weights.

    Args:
        engine: that both are for.
        connection: to the rank.
    """

    def __init__(self, engine: TransformersEngine, connection: Connection):
        self.engine, self.connection = engine, connection
        self.weights: queue.Queue[Message] = queue.Queue()
        self.batches: queue.Queue[Message] = queue.Queue()
        self.something = threading.Semaphore(0)
        self.end = EngineEnd(engine.receiver, engine.device, self.weights, connection.send)

    def run(self) -> None:
        """Until the rank is gone."""
        threading.Thread(target=self._read, daemon=True, name="messages").start()
        while True:
            self.something.acquire()
            self.take_weights()
            if not self.batches.empty():
                self._generate(*self.batches.get()[1:])

    def take_weights(self) -> None:
        """Handles what has come about weights; from the beginning of an update to its end."""
        while not self.weights.empty():
            self.end.handle(self.weights.get())

    def _generate(self, number: int, asked: list[tuple[list[int], int, float]]) -> None:
        try:
            completions = self.engine.generate([Request(*parts) for parts in asked], between_tokens=self.take_weights)
            answer: Message = ("completions", number, [_told(completion) for completion in completions])
        except Exception as error:
            answer = ("failed", number, innermost(error))
        self.connection.send(answer)

    def _read(self) -> None:
        """In a thread: what comes while the engine works waits in memory, not in the pipe, which has little room."""
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, OSError):  # the rank is gone
                os._exit(0)
            (self.batches if message[0] == "generate" else self.weights).put(message)
            self.something.release()


def _told(completion: Completion) -> tuple[Any, ...]:
    versions = completion.versions or (None, None)
    return (completion.token_ids, completion.logprobs, completion.finish, *versions, completion.routes)


if __name__ == "__main__":
    main()
