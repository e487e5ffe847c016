"""What some tests need, and are skipped without."""

from importlib.util import find_spec

import pytest
import torch

needs_nemo = pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="needs nemo_automodel: the extra nemo")


def need_gpus(count: int) -> None:
    """Skips the test that runs if there are fewer GPUs."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")
