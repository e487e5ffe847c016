"""Silences remarks of libraries that say nothing about the user's run."""

import logging
import os
import warnings


def quiet_libraries() -> None:
    """For command-line runs, before these libraries are imported; as a library the package leaves logging alone."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in (
        "torchao",
        "torch.utils._pytree",
    ):  # optional kernels that this machine lacks; a deprecation inside torchao
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
