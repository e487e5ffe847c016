"""Images in token sequences: which tokens stand for them, and their pixels, which are read where they are encoded.

Shape letters: T tokens of a microbatch, m of them image tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from automodel_rl.batch.move import move

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width, as the model's image processor counts them."""


@dataclass(frozen=True)
class Image:
    """An image in a sequence, whose tokens are neighbours.

    Attributes:
        start: place of its first token in the sequence, or in the microbatch.
        num_tokens: that stand for it.
        grid: its patches.
        pixels: as the model's image processor gives them for one image, or a picklable function that makes them. It is
            called on the rank that encodes the image, so that pixels need not travel.

    Example:
        >>> import torch
        >>> image = Image(start=3, num_tokens=16, grid=(1, 4, 4), pixels=torch.zeros(3, 56, 56))
        >>> image.load().shape
        torch.Size([3, 56, 56])
    """

    start: int
    num_tokens: int
    grid: Grid
    pixels: Tensor | Callable[[], Tensor]

    def load(self) -> Tensor:
        """Its pixels, on the host."""
        return self.pixels() if callable(self.pixels) else self.pixels

    def moved(self, places: int) -> "Image":
        """The same image so many places further on."""
        return dataclasses.replace(self, start=self.start + places)


@dataclass(frozen=True)
class ImageTokens:
    """Which of a rank's tokens stand for images, and what takes their place before the first layer.

    Attributes:
        places: of image tokens among this rank's, int64 [i].
        rows: for each of them the row of `embeddings`, int64 [i].
        embeddings: of all images of the microbatch, in order, [m, H]; None on ranks that have no use for them.
    """

    places: Tensor
    rows: Tensor
    embeddings: Tensor | None = None

    def to(self, device: torch.device) -> "ImageTokens":
        """The same on `device`, but for `embeddings`, which are made there."""
        return dataclasses.replace(self, places=move(self.places, device), rows=move(self.rows, device))

    def within(self, start: int, stop: int) -> "ImageTokens":
        """Those of a stretch of the rank's tokens, by their places in it."""
        inside = (self.places >= start) & (self.places < stop)
        return dataclasses.replace(self, places=self.places[inside] - start, rows=self.rows[inside])

    def put_into(self, hidden: Tensor) -> Tensor:
        """Hidden states [1, t, H] with the embeddings of images in their places."""
        assert self.embeddings is not None
        found = self.embeddings.index_select(0, self.rows)
        return hidden.squeeze(0).index_copy(0, self.places, found).unsqueeze(0)


NO_IMAGES = ImageTokens(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def check_images(images: Sequence[Image], num_tokens: int) -> None:
    """Raises ValueError where images of a sequence overlap, are out of order, or lie outside of it."""
    end = 0
    for number, image in enumerate(images):
        if image.start < end or image.num_tokens < 1 or image.start + image.num_tokens > num_tokens:
            raise ValueError(
                f"image {number} has tokens {image.start} to {image.start + image.num_tokens - 1} of {num_tokens}: "
                "images lie within the sequence, in order and apart"
            )
        end = image.start + image.num_tokens


def image_places(images: Sequence[Image], num_tokens: int) -> np.ndarray:
    """The place of every token of a microbatch among its image tokens, -1 for text; int64 [T]."""
    rows = np.full(num_tokens, -1)
    seen = 0
    for image in images:
        rows[image.start : image.start + image.num_tokens] = np.arange(seen, seen + image.num_tokens)
        seen += image.num_tokens
    return rows


def multimodal_positions(images: Sequence[Image], lengths: Sequence[int], merge: int) -> Tensor:
    """Rotary positions in time, height and width (M-RoPE, arXiv:2409.12191, section 2.1), int64 [3, T].

    Text counts on in all three; an image's tokens have their own place in its grid, and the text after it goes on from
    the largest. Every sequence starts at 0.

    Args:
        images: of the microbatch, in order.
        lengths: tokens of its sequences.
        merge: patches that make one token, along height and along width.
    """
    pieces: list[np.ndarray] = []
    start, left = 0, list(images)
    for length in lengths:
        position, done = 0, start
        while left and left[0].start < start + length:
            image = left.pop(0)
            pieces.append(np.tile(position + np.arange(image.start - done), (3, 1)))
            position += image.start - done
            time, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
            pieces.append(np.indices((time, height, width)).reshape(3, -1) + position)
            position += max(height, width)
            done = image.start + image.num_tokens
        pieces.append(np.tile(position + np.arange(start + length - done), (3, 1)))
        start += length
    return torch.from_numpy(np.concatenate(pieces, axis=1))
