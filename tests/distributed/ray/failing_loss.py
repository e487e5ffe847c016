"""A loss that fails."""

from automodel_rl.batch import Microbatch
from automodel_rl.losses import LossOutput, TokenOutputs


def fail(outputs: TokenOutputs, microbatch: Microbatch) -> LossOutput:
    """Raises an error in every microbatch."""
    if len(microbatch.lengths) > 0:
        raise ValueError("planted")
    raise AssertionError("no microbatch is empty here")
