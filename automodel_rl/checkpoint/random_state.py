"""Random states of Python, NumPy, and torch on host and device, as JSON."""

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns this process's random states, for `set_random_state`."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, [*words], gauss],
        "numpy": [kind, _text(torch.from_numpy(np.asarray(keys).view(np.uint8))), place, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores random states from `random_state`. The device's is unchanged if `state` has none for CUDA."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, _bytes(keys).numpy().view(np.uint32), place, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


def _text(content: Tensor) -> str:
    return base64.b64encode(content.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
