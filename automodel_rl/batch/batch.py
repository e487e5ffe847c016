"""A global batch: rows of tokens with further values, in the order of the program that made them."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from automodel_rl.batch.microbatch import TokenSequence, to_predictor

EPISODE_TOKENS = "episode_tokens"
"""The name of the value that tells how many tokens count in the loss of a token's whole episode."""


@dataclasses.dataclass(frozen=True)
class RoutesAt:
    """The place of the routes of consecutive tokens of a row, which are too large to travel with it.

    Attributes:
        rank: the rank that has them.
        key: their name there.
        start, stop: the tokens, from the row's first one on.
    """

    rank: int
    key: tuple[int, int]
    start: int
    stop: int


class Batch:
    """Rows of a global batch, numbered from 0. A row is a token sequence with per-token values, each with a name.

    Args:
        sequences: the rows.
        together: number of consecutive rows that share a microbatch and stay next to each other, e.g. 2 for pairs.
        routes: where the routes of each row are that a mixture has to follow, piece by piece from its first token to
            its last; empty if there are none.
        parts: the rows of each part, for a batch that several optimizer steps train on; by default there is one part.
        episodes: the episode of each row, for an episode of several rows, which stay in one part. What losses divide by
            the number of sequences counts an episode once. None if each row is one by itself.

    Attributes:
        episodes: the episode of each row.

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
        together: int = 1,
        routes: Sequence[Sequence[RoutesAt]] = (),
        parts: Sequence[Sequence[int]] | None = None,
        episodes: Sequence[int] | None = None,
    ):
        self.sequences, self.together, self.routes = [*sequences], together, tuple(routes)
        self.episodes = [*range(len(self.sequences))] if episodes is None else [*episodes]
        self.parts = [[*range(len(self.sequences))]] if parts is None else [[*part] for part in parts]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return [*map(len, self.sequences)]

    @property
    def num_episodes(self) -> int:
        """Number of episodes: that of rows, unless some have several."""
        return len({*self.episodes})

    @property
    def episode_tokens(self) -> Tensor:
        """Tokens that count in the loss of each row's whole episode, float64 [N]."""
        of_rows = [int(sequence.loss_mask[1:].sum()) for sequence in self.sequences]
        of_episodes: dict[int, int] = {}
        for episode, count in zip(self.episodes, of_rows, strict=True):
            of_episodes[episode] = of_episodes.get(episode, 0) + count
        return torch.tensor([of_episodes[episode] for episode in self.episodes], dtype=torch.float64)

    def __contains__(self, name: str) -> bool:
        """Whether rows have values of this name."""
        return bool(self.sequences) and name in self.sequences[0].values

    def __getitem__(self, name: str) -> list[Tensor]:
        """The values of each row, [n], aligned with its tokens."""
        return [sequence.values[name] for sequence in self.sequences]

    def __setitem__(self, name: str, values: Sequence[Tensor] | Tensor) -> None:
        """Gives every row values.

        Args:
            name: the name, by which losses read them.
            values: a tensor [n] for each row, aligned with its tokens; or a number for each row, [N], for all of its
                tokens.

        Raises:
            ValueError: there are not as many as rows, or a tensor does not fit its row.
        """
        if len(values) != len(self):
            raise ValueError(f"{name} has {len(values)} entries for {len(self)} rows: give one for each row")
        of_rows = zip(values, self.sequences, strict=True)
        pieces = [value.expand(len(sequence)) if value.ndim == 0 else value for value, sequence in of_rows]
        self.sequences = [
            dataclasses.replace(sequence, values={**sequence.values, name: piece})
            for sequence, piece in zip(self.sequences, pieces, strict=True)
        ]

    def rows(self, numbers: Sequence[int]) -> "Batch":
        """A batch of one part, with some of the rows and their values.

        Args:
            numbers: the rows, in the order that they get.
        """
        routes = [self.routes[number] for number in numbers] if self.routes else ()
        return Batch(
            [self.sequences[number] for number in numbers],
            together=self.together,
            routes=routes,
            episodes=[self.episodes[number] for number in numbers],
        )

    def dealt(self, parts: Sequence[Sequence[int]]) -> "Batch":
        """The batch with its rows divided into other parts.

        Args:
            parts: the rows of each part.
        """
        return Batch(self.sequences, together=self.together, routes=self.routes, parts=parts, episodes=self.episodes)

    def split(self, count: int | None = None) -> list["Batch"]:
        """Batches that an optimizer step each trains on.

        Args:
            count: number of batches, to which rows, or rows that stay together, are dealt in turn; None for those that
                the batch was made of. The rows of an episode stay together.
        """
        parts = self.parts
        if count is not None:
            of_pairs = [row // self.together for row in range(len(self))]
            stay_together = of_pairs if self.num_episodes == len(self) else self.episodes
            units = [[*rows] for _, rows in itertools.groupby(range(len(self)), key=lambda row: stay_together[row])]
            count = min(count, max(1, len(units)))
            parts = [[row for unit in units[number::count] for row in unit] for number in range(count)]
        return [self.rows(part) for part in parts]

    def sums(self, values: Sequence[Tensor]) -> Tensor:
        """The sum of each row's values over the tokens that count in its loss, float64 [N].

        Args:
            values: a tensor [n] for each row, aligned with its tokens.
        """
        of_rows = zip(self.sequences, values, strict=True)
        # Summed at the predicting positions, as losses sum.
        sums = [to_predictor(torch.where(row.loss_mask, of_row.double(), 0.0)).sum() for row, of_row in of_rows]
        return torch.stack(sums) if sums else torch.empty(0, dtype=torch.float64)
