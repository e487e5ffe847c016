"""A unique name for each attempt at a job.

Restarted ranks may find a store that still holds an earlier attempt's messages. The restart count does not tell
attempts apart: each machine's agent keeps its own, and a replacement machine starts from 0.
"""

import json
import os
import time
import uuid
from typing import Any

CHALLENGE = "automodel_rl/attempt/challenge"

POLL_SECONDS = 0.05


def agree_on_attempt(store: Any, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Returns a name for this attempt: the same on all ranks, and new to the store. Every rank must call it.

    Rank 0 proposes a name, the others answer it, and rank 0 confirms the answers. A rank that reads an earlier
    attempt's proposal gets no confirmation and reads again. Raises TimeoutError if the other ranks do not start in
    time.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    if rank == 0:
        store.set(CHALLENGE, own)
    while time.monotonic() < deadline:
        name = _read(store, CHALLENGE)
        if name:
            store.set(f"automodel_rl/attempt/{name}/{rank}", own)
            if rank == 0 and all(store.check([f"automodel_rl/attempt/{name}/{other}"]) for other in range(world_size)):
                answers = [_read(store, f"automodel_rl/attempt/{name}/{other}") for other in range(world_size)]
                store.set(f"automodel_rl/attempt/{name}/all", json.dumps(answers))
            if own in json.loads(_read(store, f"automodel_rl/attempt/{name}/all") or "[]"):
                return name
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"rank {rank} of {world_size} waited {timeout_seconds:.0f} s for the other ranks to start")


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def is_started_by_agent() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
