"""Process of a transformers generator. It writes completions, and takes weights between two tokens.

    python -m automodel_rl.generators.transformers_worker DESCRIPTOR

The connection with that file descriptor delivers the rank's messages (`generator_messages`). `Start` contains a
`ModelCopy` and a `TransformersSettings`.
"""

import os
import queue
import sys
import threading
from multiprocessing.connection import Connection

from automodel_rl.errors import describe_root_cause
from automodel_rl.generator_messages import (
    Answer,
    Failure,
    Finished,
    Generate,
    GenerateFailed,
    Message,
    ProtocolError,
    RawCompletion,
    receive_start,
)
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.transformers_generator import TransformersGenerator
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.weight_sync.generator_end import GeneratorEnd


def main() -> None:
    quiet_libraries()
    connection = Connection(int(sys.argv[-1]))
    try:
        generator = TransformersGenerator(*receive_start(connection).settings)
    except ProtocolError as error:
        connection.send(Failure(str(error)))
        return
    except Exception as error:
        connection.send(Failure(describe_root_cause(error)))
        return
    connection.send(Answer("start", ""))
    TransformersWorker(generator, connection).run()


class TransformersWorker:
    def __init__(self, generator: TransformersGenerator, connection: Connection):
        self.generator, self.connection = generator, connection
        self.weights: queue.Queue[Message] = queue.Queue()
        self.batches: queue.Queue[Generate] = queue.Queue()
        self.something = threading.Semaphore(0)
        self.end = GeneratorEnd(generator.receiver, generator.copy.device, self.weights, connection.send)

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True, name="messages").start()
        while True:
            self.something.acquire()
            self.take_weights()
            if not self.batches.empty():
                self._generate(self.batches.get())

    def take_weights(self) -> None:
        """Handles pending messages about weights. Completes a weight sync that has begun."""
        while not self.weights.empty():
            self.end.handle(self.weights.get())

    def _generate(self, order: Generate) -> None:
        def send(index: int, completion: Completion) -> None:
            self.connection.send(Finished(order.number, index, _written(completion)))

        try:
            self.generator.generate(order.requests, self.take_weights, send)
        except Exception as error:
            self.connection.send(GenerateFailed(order.number, describe_root_cause(error)))

    def _read(self) -> None:
        """Receives messages in a thread, as the pipe holds few while the generator is busy."""
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, OSError):  # the rank is gone
                os._exit(0)
            if isinstance(message, Generate):
                self.batches.put(message)
            else:
                self.weights.put(message)
            self.something.release()


def _written(completion: Completion) -> RawCompletion:
    oldest, newest = completion.versions or (None, None)
    return RawCompletion(
        completion.token_ids, completion.logprobs, completion.finish, oldest, newest, completion.routes
    )


if __name__ == "__main__":
    main()
