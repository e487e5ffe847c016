"""Global batches: rows of tokens with named per-token values, in the order of the program that created them."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from automodel_rl.batch.microbatch import TokenSequence, to_predictor

EPISODE_TOKENS = "episode_tokens"
"""Name of the value with the number of trained tokens in a token's whole episode."""


@dataclasses.dataclass(frozen=True)
class RoutesRef:
    """A reference to the routes of consecutive tokens of a row, which are too large to be sent with it.

    Attributes:
        rank: rank that stores them.
        key: their key there.
        start, stop: range of tokens in the row.
    """

    rank: int
    key: tuple[int, int]
    start: int
    stop: int


class Batch:
    """Rows of a global batch, numbered from 0. A row is a token sequence with named per-token values.

    Args:
        sequences: the rows.
        sequences_per_example: number of consecutive rows that must be adjacent in one microbatch, e.g. 2 for pairs.
        routes: per row, references to the routes to replay, covering it from first to last token; empty if there are
            none.
        parts: row indices per optimizer step, for a batch that is used for several; a single part by default.
        episodes: episode index of each row, for episodes of several rows, which stay in one part and count once where
            losses divide by the number of sequences. None if each row is an episode.

    Attributes:
        episodes: episode index of each row.

    Example:
        >>> import torch
        >>> batch = Batch([TokenSequence(torch.arange(n), torch.ones(n, dtype=torch.bool)) for n in (3, 2, 2)])
        >>> batch["advantages"] = torch.tensor([0.5, -0.5, 1.0])  # a number for each row, or a tensor [n] for each
        >>> [values.tolist() for values in batch["advantages"]]
        [[0.5, 0.5, 0.5], [-0.5, -0.5], [1.0, 1.0]]
        >>> [len(part) for part in batch.split(2)]
        [2, 1]
    """

    def __init__(
        self,
        sequences: Iterable[TokenSequence],
        *,
        sequences_per_example: int = 1,
        routes: Sequence[Sequence[RoutesRef]] = (),
        parts: Sequence[Sequence[int]] | None = None,
        episodes: Sequence[int] | None = None,
    ):
        self.sequences, self.sequences_per_example, self.routes = [*sequences], sequences_per_example, tuple(routes)
        self.episodes = [*range(len(self.sequences))] if episodes is None else [*episodes]
        self.parts = [[*range(len(self.sequences))]] if parts is None else [[*part] for part in parts]

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        return [*map(len, self.sequences)]

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len({*self.episodes})

    @property
    def episode_tokens(self) -> Tensor:
        """Number of trained tokens in each row's whole episode, float64 [N]."""
        of_rows = [int(sequence.loss_mask[1:].sum()) for sequence in self.sequences]
        of_episodes: dict[int, int] = {}
        for episode, count in zip(self.episodes, of_rows, strict=True):
            of_episodes[episode] = of_episodes.get(episode, 0) + count
        return torch.tensor([of_episodes[episode] for episode in self.episodes], dtype=torch.float64)

    def __contains__(self, name: str) -> bool:
        """Whether rows have values with this name."""
        return bool(self.sequences) and name in self.sequences[0].values

    def __getitem__(self, name: str) -> list[Tensor]:
        """Returns the values of each row, [n], aligned with its tokens."""
        return [sequence.values[name] for sequence in self.sequences]

    def __setitem__(self, name: str, values: Sequence[Tensor] | Tensor) -> None:
        """Sets the values called `name` of all rows. `values` holds a tensor [n] per row, aligned with its tokens, or
        is a tensor [N] with one number for all tokens of each row.

        Raises:
            ValueError: the number of entries or the length of a tensor does not match the rows.
        """
        if len(values) != len(self):
            raise ValueError(f"{name} has {len(values)} entries for {len(self)} rows: pass one for each row")
        of_rows = zip(values, self.sequences, strict=True)
        pieces = [value.expand(len(sequence)) if value.ndim == 0 else value for value, sequence in of_rows]
        self.sequences = [
            dataclasses.replace(sequence, values={**sequence.values, name: piece})
            for sequence, piece in zip(self.sequences, pieces, strict=True)
        ]

    def rows(self, numbers: Sequence[int]) -> "Batch":
        """Returns a batch with the rows of the given `numbers`, in that order, as one part."""
        routes = [self.routes[number] for number in numbers] if self.routes else ()
        return Batch(
            [self.sequences[number] for number in numbers],
            sequences_per_example=self.sequences_per_example,
            routes=routes,
            episodes=[self.episodes[number] for number in numbers],
        )

    def dealt(self, parts: Sequence[Sequence[int]]) -> "Batch":
        """Returns the batch with its rows divided into other `parts`."""
        return Batch(
            self.sequences,
            sequences_per_example=self.sequences_per_example,
            routes=self.routes,
            parts=parts,
            episodes=self.episodes,
        )

    def split(self, count: int | None = None) -> list["Batch"]:
        """Returns one batch per optimizer step: `count` batches, to which rows are dealt in turn, or None for the parts
        given on construction. Rows of an episode stay in one batch, as do rows of one example."""
        parts = self.parts
        if count is not None:
            of_pairs = [row // self.sequences_per_example for row in range(len(self))]
            stay_together = of_pairs if self.num_episodes == len(self) else self.episodes
            units = [[*rows] for _, rows in itertools.groupby(range(len(self)), key=lambda row: stay_together[row])]
            count = min(count, max(1, len(units)))
            parts = [[row for unit in units[number::count] for row in unit] for number in range(count)]
        return [self.rows(part) for part in parts]

    def sums(self, values: Sequence[Tensor]) -> Tensor:
        """Sums each row's `values`, a tensor [n] per row aligned with its tokens, over the trained tokens: float64
        [N]."""
        of_rows = zip(self.sequences, values, strict=True)
        # Summed at the predicting positions, like losses.
        sums = [to_predictor(torch.where(row.loss_mask, of_row.double(), 0.0)).sum() for row, of_row in of_rows]
        return torch.stack(sums) if sums else torch.empty(0, dtype=torch.float64)
