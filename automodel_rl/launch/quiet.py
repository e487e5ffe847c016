"""Silences remarks of libraries that say nothing about the user's run."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

LOGGERS = ("torchao", "torch.utils._pytree", "torch._higher_order_ops.wrap")
"""Loggers that remark on kernels that a machine lacks, a deprecation in torchao, and recomputation in graphs."""


def quiet_libraries() -> None:
    """Silences libraries for the rest of a command, before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silences what libraries log and warn of while the block imports them; after it logging is as it was."""
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
