"""What a run ran with: versions of libraries, the machine, and when it was started."""

import os
import platform
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("automodel-rl", "torch", "transformers", "nemo-automodel", "datasets", "triton", "transformer-engine")


def versions() -> dict[str, Any]:
    """Versions, machine, and the time by the wall clock, as JSON."""
    import torch  # takes seconds, and the command line checks run directories before it needs it

    devices = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {
        **{name: found for name in PACKAGES if (found := _version(name)) is not None},
        "python": platform.python_version(),
        "CUDA": torch.version.cuda,
        "device": devices,
        "ranks": int(os.environ.get("WORLD_SIZE", 1)),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
