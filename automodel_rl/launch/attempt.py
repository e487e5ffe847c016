"""A name for each attempt at a job.

An agent may start ranks again on a store that still has the messages of an earlier attempt. The number of restarts does
not tell attempts apart: each machine's agent counts for itself, and a machine that is replaced starts from 0. So the
ranks agree on a name that nobody has used before.
"""

import json
import os
import time
import uuid
from typing import Any

CHALLENGE = "automodel_rl/attempt/challenge"

POLL_SECONDS = 0.05


def agree_on_attempt(store: Any, rank: int, world_size: int, timeout_seconds: float) -> str:
    """A name for this attempt, the same on all its ranks and new to the store. All ranks call it.

    Rank 0 proposes a name, the other ranks answer, and rank 0 confirms the answers. A rank may read the proposal of an
    earlier attempt; then nobody confirms its answer, and it reads again.

    Args:
        store: the job's store.
        rank: this process's rank.
        world_size: number of ranks of the job.
        timeout_seconds: longest wait for the other ranks.

    Raises:
        TimeoutError: the other ranks did not come.
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
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
