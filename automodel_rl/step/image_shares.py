"""Shares of encoder lanes in the images of a step. `bridge.py` says what lanes are.

Images of a microbatch that have the same pixels, as in a pair of completions or a group of them, are encoded once.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_rl.batch import Image, Microbatch, distinct_images
from automodel_rl.step.bridge import Bridge


class ImageShares:
    """The images of a step, dealt to encoder lanes: in each microbatch largest first, each to the lane with least work.

    Args:
        bridge: the bridge between encoder and language model.
    """

    def __init__(self, bridge: Bridge):
        self.bridge = bridge
        self._images: dict[int, list[tuple[Image, ...]]] = {}
        self._shares: dict[int, list[list[list[int]]]] = {}

    def exchange(self, microbatches: Sequence[Microbatch]) -> None:
        """Tells the ranks of this rank's lanes of the images. A collective of all ranks with the encoder or a first
        stage.

        Args:
            microbatches: this data rank's microbatches.
        """
        own = [distinct_images(microbatch.images) for microbatch in microbatches]
        self._images = {lane: images or [] for lane, images in self.bridge.exchange(own).items()}
        self._shares = {lane: self._dealt(lane) for lane in self._images}

    def clear(self) -> None:
        """Lets go of a step's images."""
        self._images, self._shares = {}, {}

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of each data rank."""
        return max(map(len, self._images.values()), default=0)

    @property
    def has_images(self) -> bool:
        """Whether any lane of this rank has an image."""
        return any(any(map(len, of_lane)) for of_lane in self._images.values())

    def of_lane(self, lane: int, microbatch: int) -> tuple[Image, ...]:
        """All images of a microbatch, in order."""
        return self._images[lane][microbatch]

    def numbers(self, lane: int, share: int, microbatch: int) -> list[int]:
        """Places of the images that one encoder lane encodes, among those of the microbatch, in order.

        Args:
            lane: the language lane.
            share: the place of the encoder lane among those that serve it.
            microbatch: the microbatch's index.
        """
        return self._shares[lane][microbatch][share]

    def images(self, lane: int, share: int, microbatch: int) -> list[Image]:
        """The images that one encoder lane encodes of a microbatch. The arguments are those of `numbers`."""
        return [self._images[lane][microbatch][number] for number in self.numbers(lane, share, microbatch)]

    def size(self, lane: int, share: int, microbatch: int) -> int:
        """Number of embeddings of these images. The arguments are those of `numbers`."""
        return sum(image.num_embeddings for image in self.images(lane, share, microbatch))

    def joined(self, lane: int, microbatch: int, of_shares: Sequence[Tensor], like: Tensor) -> Tensor:
        """The embeddings [m, E] of a microbatch's images in order, from those that each encoder lane has made."""
        images = self.of_lane(lane, microbatch)
        pieces: dict[int, Tensor] = {}
        for share, tensor in enumerate(of_shares):
            numbers = self.numbers(lane, share, microbatch)
            split = tensor.split([images[number].num_embeddings for number in numbers]) if numbers else ()
            pieces |= dict(zip(numbers, split, strict=True))
        return torch.cat([like, *(pieces[number] for number in range(len(images)))])

    def divided(self, lane: int, microbatch: int, joined: Tensor) -> list[Tensor]:
        """The parts of what `joined` returned, or of its gradient, for each encoder lane."""
        images = self.of_lane(lane, microbatch)
        pieces = joined.split([image.num_embeddings for image in images]) if images else ()
        return [
            torch.cat([joined[:0], *(pieces[number] for number in numbers)])
            for numbers in self._shares[lane][microbatch]
        ]

    def _dealt(self, lane: int) -> list[list[list[int]]]:
        num_lanes = len(self.bridge.lanes[lane].encoder_leaders)
        load, dealt = [0] * num_lanes, []
        for images in self._images[lane]:
            shares: list[list[int]] = [[] for _ in range(num_lanes)]
            work = [math.prod(image.grid) for image in images]
            for number in sorted(range(len(images)), key=lambda n: (-work[n], n)):
                least = load.index(min(load))
                shares[least].append(number)
                load[least] += work[number]
            dealt.append([sorted(share) for share in shares])
        return dealt
