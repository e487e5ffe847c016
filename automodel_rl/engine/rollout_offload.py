"""Offloads the trainer during rollouts, to free device memory for generators."""

import gc
from collections.abc import Callable

import torch

from automodel_rl.engine.engine import Engine

MAX_KEPT = 0.1
"""Largest share of the offloaded bytes that may remain unusable for other processes without a warning."""


class RolloutOffload:
    """Moves the trainer's weights and moments to the host during rollouts, as configured by `memory.offload`.

    Attributes:
        warning: a message about offloaded memory that other processes cannot use, or "".
    """

    def __init__(self, engine: Engine):
        self.engine, self.handle = engine, engine.handle
        offload = self.handle.memory.offload
        self.what: tuple[str, ...] = () if offload is None else offload.what
        self.warning = ""

    def before_sync(self) -> None:
        """Offloads the moments, which a weight sync does not need, until the next optimizer step."""
        if "moments" in self.what:
            self._move(self.engine.moments_to_host)

    def after_sync(self) -> None:
        """Offloads the weights."""
        if "weights" in self.what:
            self._move(self.handle.to_host)

    def restore(self) -> None:
        """Brings the weights back, if they are on the host."""
        self.handle.to_device()

    def _move(self, to_host: Callable[[], int]) -> None:
        device = self.handle.layout.device
        if device.type != "cuda":
            to_host()
            return
        torch.cuda.empty_cache()  # so that memory unused before is not counted
        before, _ = torch.cuda.mem_get_info(device)
        moved = to_host()
        gc.collect()
        torch.cuda.empty_cache()
        freed = torch.cuda.mem_get_info(device)[0] - before
        if moved and freed < (1 - MAX_KEPT) * moved:  # others may use the device meanwhile
            self.warning = (
                f"warning: of {moved / 2**30:.1f} GiB that were offloaded, generators can use {freed / 2**30:.1f}: the "
                "rest is fragmented by memory that the trainer still uses"
            )
