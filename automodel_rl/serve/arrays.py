"""Arrays in messages: dense, or sparse in compressed row format (CSR)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from automodel_rl.errors import InputError


@dataclass(frozen=True)
class SparsePositions:
    """Positions of a sparse array's listed entries.

    Attributes:
        row_ends: number of entries before each row, and in total, int64 [rows + 1].
        columns: column of each entry, int64 [entries].
    """

    row_ends: np.ndarray
    columns: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Row of each entry, int64 [entries]."""
        return np.repeat(np.arange(len(self.row_ends) - 1), np.diff(self.row_ends))

    def check(self, shape: Sequence[int], num_values: int, name: str) -> None:
        """Raises InputError unless these are `num_values` distinct positions in an array of this shape."""
        ends, columns = self.row_ends, self.columns
        if (
            len(shape) != 2
            or len(ends) != shape[0] + 1
            or (ends[0], ends[-1]) != (0, len(columns))
            or (ends[1:] < ends[:-1]).any()  # a difference could overflow
            or len(columns) != num_values
            or not ((columns >= 0) & (columns < shape[1])).all()
        ):
            raise InputError(
                f"{name} is sparse, and its {num_values} values, row pointers and columns do not fit the shape "
                f"{list(shape)}"
            )
        if len(np.unique(self.rows * shape[1] + columns)) < num_values:
            raise InputError(f"{name} is sparse and lists a position twice: list each position once")


def array_of(
    values: np.ndarray,
    shape: Sequence[int],
    positions: SparsePositions | None,
    unlisted: int,
    max_bytes: int,
    name: str,
) -> np.ndarray:
    """Returns the array in a message, with one or two dimensions.

    Args:
        values: all values, or the listed ones.
        shape: empty for [len(values)].
        positions: positions of the listed values; None if the array is dense.
        unlisted: value of all other entries.
        max_bytes: size limit of a sparse array once it is dense.
        name: the array's name, for errors.

    Raises:
        InputError: values, shape and positions do not match, or the array is too large.
    """
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise InputError(f"{name} has the shape {list(shape)}: pass one or two dimensions")
    if positions is None:
        if shape and np.prod(shape, dtype=object) != len(values):
            raise InputError(f"{name} has {len(values)} values for the shape {list(shape)}")
        return values.reshape(tuple(shape)) if shape else values
    if np.prod(shape, dtype=object) * values.itemsize > max_bytes:
        raise InputError(
            f"{name} has the shape {list(shape)}: arrays of a request are limited to limits.body_mib, including sparse "
            "ones"
        )
    positions.check(shape, len(values), name)
    found = np.full(tuple(shape), unlisted, values.dtype)
    found[positions.rows, positions.columns] = values
    return found
