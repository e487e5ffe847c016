"""Packing of sequences into microbatches by best-fit decreasing, and even distribution of microbatches over data
ranks."""

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from automodel_rl.batch.microbatch import Microbatch, TokenSequence, check_sequences, empty_microbatch, pack_microbatch
from automodel_rl.errors import InputError

Bin = list[int]
"""Sequences of one microbatch, as indices into the packed list."""


@dataclass(frozen=True)
class DataShare:
    """One data rank's share of a global batch.

    Attributes:
        rank: the data rank.
        count: number of data ranks.

    Example:
        >>> list(range(10))[DataShare(rank=1, count=4).places]
        [1, 5, 9]
    """

    rank: int = 0
    count: int = 1

    @property
    def places(self) -> slice:
        """Indices of this rank's entries in a list that is dealt to the data ranks in turn."""
        return slice(self.rank, None, self.count)


def assign_bins(lengths: Sequence[int], capacity: int, *, min_count: int = 1, multiple: int = 1) -> list[Bin]:
    """Packs sequences into bins by best-fit decreasing, then splits bins to reach the requested number.

    Best-fit decreasing needs at most 11/9 of the optimal number of bins, plus one (Johnson et al., 1974, "Worst-case
    performance bounds for simple one-dimensional packing algorithms").

    Args:
        lengths: tokens of each sequence, or of each group that shares a bin; at most `capacity` each.
        capacity: maximum tokens of a bin.
        min_count: minimum number of bins.
        multiple: the number of bins is a multiple of this.

    Returns:
        Bins of indices into `lengths`. Some are empty only if there are fewer sequences than bins.
    """
    assert max(lengths, default=0) <= capacity
    bins = _best_fit_decreasing(lengths, capacity)
    count = -(-max(len(bins), min_count) // multiple) * multiple
    return _split_up_to(bins, lengths, count)


def _best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[Bin]:
    bins: list[Bin] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), sorted: the first that fits is the fullest
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(free, (lengths[place], -1))
        if at == len(free):
            bins.append([])
            left, chosen = capacity, len(bins) - 1
        else:
            left, chosen = free.pop(at)
        bins[chosen].append(place)
        bisect.insort(free, (left - lengths[place], chosen))
    return bins


def _split_up_to(bins: list[Bin], lengths: Sequence[int], count: int) -> list[Bin]:
    """Halves the bin with most tokens until there are `count` bins. Adds empty bins once no bin can be halved."""
    heap = [(-sum(lengths[i] for i in b), n, b) for n, b in enumerate(bins)]
    heapq.heapify(heap)
    done: list[Bin] = []
    serial = len(bins)
    while heap and len(heap) + len(done) < count:
        _, _, largest = heapq.heappop(heap)
        if len(largest) == 1:
            done.append(largest)
            continue
        halves: tuple[Bin, Bin] = ([], [])
        for place in largest:  # longest first, each to the lighter half
            min(halves, key=lambda half: sum(lengths[i] for i in half)).append(place)
        for half in halves:
            heapq.heappush(heap, (-sum(lengths[i] for i in half), serial, half))
            serial += 1
    bins = done + [b for _, _, b in heap]
    return bins + [[] for _ in range(count - len(bins))]


def share_bins(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Distributes bins evenly over data ranks: the most expensive first, each to the rank with the least work so far.
    `costs` is the work of each bin; their number must be a multiple of `num_shares`. Returns the bin indices of each
    data rank, most expensive first."""
    per_share = len(costs) // num_shares
    if per_share * num_shares != len(costs):
        raise ValueError(f"{len(costs)} bins cannot be divided evenly among {num_shares} data ranks")
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    heap = [(0.0, rank) for rank in range(num_shares)]
    for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        shares[rank].append(place)
        if len(shares[rank]) < per_share:
            heapq.heappush(heap, (load + costs[place], rank))
    return shares


def pack(
    sequences: Sequence[TokenSequence],
    capacity: int,
    *,
    share: DataShare | None = None,
    min_microbatches: int = 1,
    sequences_per_example: int = 1,
    cost: Callable[[int], float] = float,
) -> list[Microbatch]:
    """Packs a global batch into microbatches and returns those of one data rank.

    Every data rank calls this with the same sequences and gets the same number of microbatches, some of them empty if
    there are fewer sequences than microbatches.

    Args:
        sequences: the global batch.
        capacity: maximum tokens of a microbatch.
        share: the data rank; by default there is only one.
        min_microbatches: minimum microbatches per data rank, e.g. the number of pipeline stages.
        sequences_per_example: number of consecutive sequences that stay adjacent in one microbatch, e.g. 2 for pairs.
        cost: work of a sequence as a function of its length, in any unit, balanced over data ranks.

    Raises:
        InputError: a sequence, or a group of `sequences_per_example`, is longer than a microbatch.
        ValueError: the sequences are not whole groups of `sequences_per_example`, one is empty, or their values differ
            in name.

    Example:
        >>> import torch
        >>> ids, mask = torch.arange(6), torch.tensor([False, False, False, True, True, True])
        >>> microbatches = pack([TokenSequence(ids, mask), TokenSequence(ids[:3], mask[3:])], capacity=16)
        >>> [microbatch.lengths for microbatch in microbatches]
        [(6, 3)]
    """
    share = share or DataShare()
    check_sequences(sequences, range(len(sequences)))
    dealt = deal_rows(
        [*map(len, sequences)],
        capacity,
        share.count,
        min_microbatches=min_microbatches,
        sequences_per_example=sequences_per_example,
        cost=cost,
    )
    like = pack_microbatch([sequences[0]]) if sequences else None
    mine = dealt[share.rank]
    return [pack_microbatch([sequences[i] for i in p], order=p) if p else empty_microbatch(like) for p in mine]


def deal_rows(
    lengths: Sequence[int],
    capacity: int,
    num_shares: int,
    *,
    min_microbatches: int = 1,
    sequences_per_example: int = 1,
    cost: Callable[[int], float] = float,
) -> list[list[Bin]]:
    """Distributes a global batch over `num_shares` data ranks, given the tokens of each sequence. Returns the
    microbatches of each data rank, the same number for all, each as the indices of its sequences. Other arguments and
    errors are those of `pack`."""
    if len(lengths) % sequences_per_example:
        raise ValueError(f"{len(lengths)} sequences do not form whole groups of {sequences_per_example}")
    groups = [lengths[start : start + sequences_per_example] for start in range(0, len(lengths), sequences_per_example)]
    of_groups = [*map(sum, groups)]
    for place, length in enumerate(of_groups):
        if length > capacity:
            raise InputError(
                f"{_name_of(place, sequences_per_example)} {length} tokens but a microbatch holds {capacity}: "
                "truncate, drop, or raise the capacity"
            )
    bins = assign_bins(of_groups, capacity, min_count=min_microbatches * num_shares, multiple=num_shares)
    costs = [sum(cost(length) for group in b for length in groups[group]) for b in bins]
    return [
        [
            [group * sequences_per_example + i for group in bins[place] for i in range(sequences_per_example)]
            for place in share
        ]
        for share in share_bins(costs, num_shares)
    ]


def _name_of(place: int, sequences_per_example: int) -> str:
    """Returns subject and verb of an error message about a group of sequences."""
    if sequences_per_example == 1:
        return f"sequence {place} has"
    first = place * sequences_per_example
    return f"sequences {first} to {first + sequences_per_example - 1}, which stay together, have"
