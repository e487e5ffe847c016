"""Silences library warnings that are irrelevant to the user's run."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

LOGGERS = ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap")
"""Loggers that report kernels a machine lacks, a deprecation in torchao, and recomputation in graphs."""


def quiet_libraries() -> None:
    """Silences libraries for the rest of a command. Call it before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silences log messages and warnings of imports in the block, then restores the log levels."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
