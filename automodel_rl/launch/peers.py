"""No rank waits for a dead one: a rank that fails says so, and its peers leave, even from inside a collective.

gloo notices a closed connection at once. NCCL does not: a peer stays blocked on the device until its time-out.
"""

import contextlib
import datetime
import os
import threading
import time
from typing import Any

from automodel_rl.errors import EXIT_FAILURE

FAILED_KEY = "automodel_rl/failed"

POLL_SECONDS = 1.0

GRACE_SECONDS = 5.0
"""How long a peer may take to end by itself, with a message of its own, once another rank has failed."""


def tell_peers() -> None:
    """Leaves word in the job's store, if this rank has joined the job and can still reach it."""
    from torch import distributed as dist

    if not dist.is_initialized():
        return
    with contextlib.suppress(Exception):
        _connect(timeout_seconds=3).set(FAILED_KEY, os.environ["RANK"])


def watch_peers() -> None:
    """Ends this process, some seconds after, when another rank of the job has failed."""
    threading.Thread(target=_watch, daemon=True, name="peer-watch").start()


def _watch() -> None:
    store = _connect(timeout_seconds=60)
    try:
        while not store.check([FAILED_KEY]):
            time.sleep(POLL_SECONDS)
    except RuntimeError:  # the rank or agent that holds the store has ended, perhaps because all is done
        return
    time.sleep(GRACE_SECONDS)
    os._exit(EXIT_FAILURE)


def _connect(timeout_seconds: float) -> Any:
    """A connection of its own, for the process group's is in use by other threads."""
    from torch.distributed import TCPStore  # late: the launcher imports this module and must not wait for torch

    timeout = datetime.timedelta(seconds=timeout_seconds)
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
