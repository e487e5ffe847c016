"""Bugs of what saves memory with long rows."""

from typing import Any

from tests.faults.fault import Fault, patch


def _pages_given_back_early() -> Any:
    from automodel_rl.model.offloaded_activations import HostPages

    def take(pages: HostPages, num_bytes: int) -> Any:
        taken = taking(pages, num_bytes)
        pages.give_back(taken)
        return taken

    taking = HostPages.take
    return patch("model.offloaded_activations.HostPages.take", take)


FAULTS: dict[str, Fault] = {
    "pages of offloaded activations given back early": Fault(
        _pages_given_back_early,
        "unit/model/test_offloaded_activations.py::"
        "test_gradients_of_microbatches_in_flight_are_equal_to_the_bit_in_any_order[False]",
    ),
}
