"""Known bugs that are put into the package, one at a time, to see that `verify` or a test notices each."""

import contextlib
from collections.abc import Iterator

PLANTED = "AUTOMODEL_RL_PLANTED_FAULT"
"""Environment variable with the fault that tests and their ranks run with."""


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Puts a known bug into the package for the length of a block."""
    if not fault:
        yield
        return
    from tests.faults.table import FAULTS  # loads the whole package

    with FAULTS[fault].plant():
        yield
