"""The GPUs that a generator's process sees, from its start: libraries may look for them as it imports them."""

import os
from collections.abc import Sequence

from automodel_rl.errors import InputError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def local_rank() -> int:
    """This rank's number on its machine, which is that of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def visible_devices(devices: Sequence[int], own: int, count: int = 1) -> str:
    """CUDA_VISIBLE_DEVICES for this rank's generator.

    Args:
        devices: the generators' own devices, by number among those that ranks see; empty if each shares its rank's.
        own: the number of this rank's device among those that it sees. Where there are no GPUs any number will do.
        count: number of devices of the generator: of its own, or of this rank and those after it.

    Raises:
        InputError: ranks do not see these devices.
    """
    visible = os.environ.get(VISIBLE)
    names = None if visible is None else [name for name in visible.split(",") if name not in ("", "-1")]
    if visible is not None and names is not None and not devices and (not names or (count == 1 and own >= len(names))):
        return visible  # a job on CPUs: a rank has a GPU that it sees
    if devices:
        first = local_rank() * count
        numbers: Sequence[int] = devices[first : first + count]
    else:
        numbers = range(own, own + count)
    if names is not None and numbers and max(numbers) >= len(names):
        raise InputError(
            f"rollout.generator.place={list(devices)}: ranks see {len(names)} devices ({VISIBLE}={visible}), whose "
            f"numbers are 0 to {len(names) - 1}: name others"
        )
    return ",".join(str(number) if names is None else names[number] for number in numbers)
