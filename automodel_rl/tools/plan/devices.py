"""Memory, speed and interconnect of known GPUs."""

import dataclasses
from dataclasses import dataclass

from automodel_rl.errors import InputError, closest
from automodel_rl.estimate.fit import GIB


@dataclass(frozen=True)
class Device:
    """A GPU model.

    Attributes:
        gib: memory as reported by the driver.
        bf16_tflops: dense bf16 matrix products, from the data sheet.
        memory_gb_per_s: memory bandwidth, from the data sheet.
        link_gb_per_s: one-way bandwidth to GPUs of the same host: NVLink, or PCIe without it.
    """

    name: str
    gib: float
    bf16_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float

    @property
    def num_bytes(self) -> float:
        return self.gib * GIB


_KNOWN = (
    Device("A10", 22.5, 125, 600, 32),
    Device("A100", 79.2, 312, 2039, 300),
    Device("A100-40", 39.4, 312, 1555, 300),
    Device("L4", 22.5, 121, 300, 32),
    Device("L40S", 44.5, 362, 864, 32),
    Device("RTX4090", 23.5, 165, 1008, 32),
    Device("RTX5090", 31.4, 210, 1792, 64),
    Device("H100", 79.2, 989, 3350, 450),
    Device("H200", 139.8, 989, 4800, 450),
    Device("B200", 178.4, 2250, 8000, 900),
    Device("MI300X", 191.5, 1307, 5300, 448),
)

DEVICES = {device.name: device for device in _KNOWN}


def find_device(name: str | None, gib: float | None = None) -> Device:
    """Looks a GPU up by name, ignoring case and dashes; "RTX" may be omitted.

    Args:
        name: None for an H200, or for an unknown GPU with `gib` of memory.
        gib: overrides the memory; an unknown GPU then counts as fast as an H100.

    Raises:
        InputError: the name is unknown and no memory is given.
    """
    plain = {_plain(known): known for known in DEVICES}
    name = name or ("H200" if gib is None else f"{gib:g} GiB")
    found = plain.get(_plain(name)) or plain.get(f"rtx{_plain(name)}")
    if gib is not None:
        like = DEVICES[found or "H100"]
        return dataclasses.replace(like, name=name, gib=gib)
    if found is None:
        near = closest(_plain(name), plain)
        hint = f"did you mean {plain[near]}? " if near else ""
        raise InputError(
            f"--device {name}: {hint}known devices are {', '.join(DEVICES)}; set another's memory in --device-gib"
        )
    return DEVICES[found]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
