"""A process that only takes weights, and may go wrong in the midst: receiving.py FOLDER KIND DEVICE DESCRIPTOR."""

import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from automodel_rl.generator_messages import Answer, receive_start
from automodel_rl.launch.quiet import quiet_libraries
from automodel_rl.weight_sync.generator_end import GeneratorEnd
from automodel_rl.weight_sync.receiver import Receiver
from tests.distributed.weight_sync.generators import empty_homes


class Faulty(Receiver):
    """Does something at the third bucket."""

    kind = "sound"
    buckets = 0

    def load(self, *bucket: Any) -> None:
        self.buckets += 1
        if self.buckets == 3 and self.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.buckets == 3 and self.kind == "hangs":
            time.sleep(3600)
        if self.kind == "slow":
            time.sleep(0.02)
        super().load(*bucket)


def main() -> None:
    quiet_libraries()
    connection = Connection(int(sys.argv[-1]))
    device = torch.device(sys.argv[3])
    receiver = Faulty(empty_homes(Path(sys.argv[1]), torch.float32, device))
    receiver.kind = sys.argv[2]
    messages: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        while True:
            try:
                messages.put(connection.recv())
            except (EOFError, OSError):
                os._exit(0)

    receive_start(connection)
    connection.send(Answer("start", ""))
    threading.Thread(target=read, daemon=True).start()
    end = GeneratorEnd(receiver, device, messages, connection.send)
    while True:
        end.handle(messages.get())


if __name__ == "__main__":
    main()
