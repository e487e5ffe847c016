"""All bugs by name, and the one that is planted."""

import contextlib
from collections.abc import Iterator

from tests.faults import (
    agents,
    attention_and_head,
    checkpoints,
    data_and_batches,
    doors,
    few_bits,
    gradients,
    layouts,
    learned_signals,
    long_rows,
    losses,
    mixtures,
    optimizers,
    rollouts,
    surroundings,
)
from tests.faults.fault import Fault

PLANTED = "AUTOMODEL_RL_PLANTED_FAULT"
"""Environment variable with the fault that tests and their ranks run with."""

FAULTS: dict[str, Fault] = {
    **data_and_batches.FAULTS,
    **attention_and_head.FAULTS,
    **gradients.FAULTS,
    **layouts.FAULTS,
    **mixtures.FAULTS,
    **optimizers.FAULTS,
    **checkpoints.FAULTS,
    **few_bits.FAULTS,
    **long_rows.FAULTS,
    **losses.FAULTS,
    **learned_signals.FAULTS,
    **rollouts.FAULTS,
    **agents.FAULTS,
    **surroundings.FAULTS,
    **doors.FAULTS,
}


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Puts a known bug into the package for the length of a block."""
    with contextlib.nullcontext() if not fault else FAULTS[fault].plant():
        yield
