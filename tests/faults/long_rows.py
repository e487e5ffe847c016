"""Bugs of what saves memory with long rows."""

from typing import Any

from torch import Tensor

from tests.faults.fault import Fault, patch


def _pages_given_back_early() -> Any:
    from automodel_rl.model.offloaded_activations import HostPages

    def take(pages: HostPages, num_bytes: int) -> Any:
        taken = taking(pages, num_bytes)
        pages.give_back(taken)
        return taken

    taking = HostPages.take
    return patch("model.offloaded_activations.HostPages.take", take)


def _last_tile_alone() -> Any:
    def last(sums: list[Tensor], of_tile: list[Tensor]) -> None:
        for total, gradient in zip(sums, of_tile, strict=True):
            total.copy_(gradient)

    return patch("model.tiled_mlp.add_up", last)


def _no_tile_of_one_token() -> Any:
    def spans(hidden: Tensor, num_tokens: int) -> list[slice]:
        return [slice(start, start + num_tokens) for start in range(0, max(hidden.shape[1] - 1, 1), num_tokens)]

    return patch("model.tiled_mlp._spans", spans)


FAULTS: dict[str, Fault] = {
    "pages of offloaded activations given back early": Fault(
        _pages_given_back_early,
        "unit/model/test_offloaded_activations.py::"
        "test_gradients_of_microbatches_in_flight_are_equal_to_the_bit_in_any_order[False]",
    ),
    "gradients of the last tile alone": Fault(
        _last_tile_alone,
        "unit/model/test_tiled_mlp.py::test_every_dense_family_has_an_mlp_that_is_the_same_in_tiles[qwen3]",
    ),
    "a last tile of one token left out": Fault(
        _no_tile_of_one_token,
        "unit/model/test_tiled_mlp.py::test_every_dense_family_has_an_mlp_that_is_the_same_in_tiles[qwen3]",
    ),
}
