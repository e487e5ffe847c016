"""Arrays in messages: dense, or sparse with compressed rows (CSR), of which only some entries are listed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from automodel_rl.errors import InputError


@dataclass(frozen=True)
class SparsePlaces:
    """The places of an array's listed entries.

    Attributes:
        row_ends: the number of entries before each row, and of all, int64 [rows + 1].
        columns: the column of each entry, int64 [entries].
    """

    row_ends: np.ndarray
    columns: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """The row of each entry, int64 [entries]."""
        return np.repeat(np.arange(len(self.row_ends) - 1), np.diff(self.row_ends))

    def check(self, shape: Sequence[int], num_values: int, name: str) -> None:
        """Raises InputError unless these are places in an array of this shape, another one for each value."""
        ends, columns = self.row_ends, self.columns
        if (
            len(shape) != 2
            or len(ends) != shape[0] + 1
            or (ends[0], ends[-1]) != (0, len(columns))
            or (ends[1:] < ends[:-1]).any()  # a difference could wrap
            or len(columns) != num_values
            or not ((columns >= 0) & (columns < shape[1])).all()
        ):
            raise InputError(
                f"{name} is sparse, and its {num_values} values, row pointers and columns do not fit the shape "
                f"{list(shape)}"
            )
        if len(np.unique(self.rows * shape[1] + columns)) < num_values:
            raise InputError(f"{name} is sparse, and lists a place twice: list each place once")


def array_of(
    values: np.ndarray, shape: Sequence[int], places: SparsePlaces | None, unlisted: int, most_bytes: int, name: str
) -> np.ndarray:
    """The array of a message, with one or two dimensions.

    Args:
        values: its values, or those that are listed.
        shape: its shape; empty for as many values as there are.
        places: the places of listed values; None for an array that is dense.
        unlisted: the value of entries that are not listed.
        most_bytes: most bytes of the array.
        name: its name, for errors.

    Raises:
        InputError: these do not fit together, or the array is too large.
    """
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise InputError(f"{name} has the shape {list(shape)}: give one or two dimensions")
    if places is None:
        if shape and np.prod(shape, dtype=object) != len(values):
            raise InputError(f"{name} has {len(values)} values for the shape {list(shape)}")
        return values.reshape(tuple(shape)) if shape else values
    if np.prod(shape, dtype=object) * values.itemsize > most_bytes:
        raise InputError(
            f"{name} has the shape {list(shape)}: arrays of a request have at most limits.body_mib, also sparse ones"
        )
    places.check(shape, len(values), name)
    found = np.full(tuple(shape), unlisted, values.dtype)
    found[places.rows, places.columns] = values
    return found
