"""GPUs visible to a generator's process. Set at its start: libraries may look for GPUs when imported."""

import os
from collections.abc import Sequence

from automodel_rl.errors import InputError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def local_rank() -> int:
    """Returns this rank's number on its machine, which is also that of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def visible_devices(devices: Sequence[int], own: int, count: int = 1) -> str:
    """Returns CUDA_VISIBLE_DEVICES for this rank's generator. Raises InputError if ranks do not see these devices.

    Args:
        devices: the generators' own, as numbers among those visible to ranks; empty if each shares its rank's.
        own: number of this rank's device among the visible ones. Ignored without GPUs.
        count: devices per generator: of its own, or those of this rank and the next ones.
    """
    visible = os.environ.get(VISIBLE)
    names = None if visible is None else [name for name in visible.split(",") if name not in ("", "-1")]
    if visible is not None and names is not None and not devices and (not names or (count == 1 and own >= len(names))):
        return visible  # a job on CPUs: otherwise a rank sees its GPU
    if devices:
        first = local_rank() * count
        numbers: Sequence[int] = devices[first : first + count]
    else:
        numbers = range(own, own + count)
    if names is not None and numbers and max(numbers) >= len(names):
        raise InputError(
            f"rollout.generator.place={list(devices)}: ranks see {len(names)} devices ({VISIBLE}={visible}), "
            f"numbered 0 to {len(names) - 1}: use these numbers"
        )
    return ",".join(str(number) if names is None else names[number] for number in numbers)
