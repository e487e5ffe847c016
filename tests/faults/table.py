"""All bugs by name."""

from tests.faults import (
    agents,
    attention_and_head,
    checkpoints,
    data_and_batches,
    doors,
    gradients,
    layouts,
    learned_signals,
    long_rows,
    losses,
    mixtures,
    optimizers,
    quantized,
    rollouts,
    surroundings,
)
from tests.faults.fault import Fault

FAULTS: dict[str, Fault] = {
    **data_and_batches.FAULTS,
    **attention_and_head.FAULTS,
    **gradients.FAULTS,
    **layouts.FAULTS,
    **mixtures.FAULTS,
    **optimizers.FAULTS,
    **checkpoints.FAULTS,
    **quantized.FAULTS,
    **long_rows.FAULTS,
    **losses.FAULTS,
    **learned_signals.FAULTS,
    **rollouts.FAULTS,
    **agents.FAULTS,
    **surroundings.FAULTS,
    **doors.FAULTS,
}
