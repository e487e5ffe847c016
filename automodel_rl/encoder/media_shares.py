"""Assignment of a step's media to encoder lanes (see bridge.py).

Media of a microbatch with the same content, as in a pair or group of completions, are encoded once.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_rl.batch import Microbatch, distinct_media
from automodel_rl.batch.media import EncoderName, Media
from automodel_rl.encoder.bridge import Bridge


class MediaShares:
    """One encoder's media in a step, assigned to encoder lanes: in each microbatch largest first, each to the lane
    with the least work."""

    def __init__(self, bridge: Bridge, name: EncoderName):
        self.bridge, self.name = bridge, name
        self._media: dict[int, list[tuple[Media, ...]]] = {}
        self._shares: dict[int, list[list[list[int]]]] = {}

    def exchange(self, microbatches: Sequence[Microbatch]) -> None:
        """Shares this data rank's media with the ranks of its lanes. A collective of all ranks with the encoder or a
        first stage."""
        own = [distinct_media(microbatch.media, self.name) for microbatch in microbatches]
        self._media = {lane: media or [] for lane, media in self.bridge.exchange(own).items()}
        self._shares = {lane: self._dealt(lane) for lane in self._media}

    def clear(self) -> None:
        """Releases a step's media."""
        self._media, self._shares = {}, {}

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches per data rank."""
        return max(map(len, self._media.values()), default=0)

    @property
    def has_media(self) -> bool:
        """Whether any lane of this rank has media."""
        return any(any(map(len, of_lane)) for of_lane in self._media.values())

    def of_lane(self, lane: int, microbatch: int) -> tuple[Media, ...]:
        """Returns all media of a microbatch, in order."""
        return self._media[lane][microbatch]

    def numbers(self, lane: int, share: int, microbatch: int) -> list[int]:
        """Returns the indices, in order, of the microbatch's media that one encoder lane encodes.

        Args:
            share: index of the encoder lane among those that serve it.
        """
        return self._shares[lane][microbatch][share]

    def of_share(self, lane: int, share: int, microbatch: int) -> list[Media]:
        """Returns the media at `numbers`."""
        return [self._media[lane][microbatch][number] for number in self.numbers(lane, share, microbatch)]

    def size(self, lane: int, share: int, microbatch: int) -> int:
        """Returns the number of embeddings of the media at `numbers`."""
        return sum(item.num_embeddings for item in self.of_share(lane, share, microbatch))

    def sizes(self, microbatch: int, of: int | None = None) -> dict[int, list[int]]:
        """Returns the number of embeddings of a microbatch from each encoder lane, by language lane: all or one
        (`of`)."""
        return {
            number: [self.size(number, share, microbatch) for share in range(len(lane.encoder_leaders))]
            for number, lane in self.bridge.lanes.items()
            if of is None or number == of
        }

    def joined(self, lane: int, microbatch: int, of_shares: Sequence[Tensor], like: Tensor) -> Tensor:
        """Joins each encoder lane's embeddings into those of a microbatch's media in order, [m, E]."""
        media = self.of_lane(lane, microbatch)
        pieces: dict[int, Tensor] = {}
        for share, tensor in enumerate(of_shares):
            numbers = self.numbers(lane, share, microbatch)
            split = tensor.split([media[number].num_embeddings for number in numbers]) if numbers else ()
            pieces |= dict(zip(numbers, split, strict=True))
        return torch.cat([like, *(pieces[number] for number in range(len(media)))])

    def divided(self, lane: int, microbatch: int, joined: Tensor) -> list[Tensor]:
        """Splits the result of `joined`, or its gradient, by encoder lane."""
        media = self.of_lane(lane, microbatch)
        pieces = joined.split([item.num_embeddings for item in media]) if media else ()
        return [
            torch.cat([joined[:0], *(pieces[number] for number in numbers)])
            for numbers in self._shares[lane][microbatch]
        ]

    def _dealt(self, lane: int) -> list[list[list[int]]]:
        num_lanes = len(self.bridge.lanes[lane].encoder_leaders)
        load, dealt = [0] * num_lanes, []
        for media in self._media[lane]:
            shares: list[list[int]] = [[] for _ in range(num_lanes)]
            work = [math.prod(item.size) for item in media]
            for number in sorted(range(len(media)), key=lambda n: (-work[n], n)):
                least = load.index(min(load))
                shares[least].append(number)
                load[least] += work[number]
            dealt.append([sorted(share) for share in shares])
        return dealt
