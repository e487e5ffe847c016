"""Media in token sequences: placeholder tokens for images and audio, and the inputs of their encoders.

Some models also add features of earlier encoder layers to image tokens after their first few layers (DeepStack,
arXiv:2406.04334). These features are stored in the same row, after a token's embedding.

Shape letters: T tokens of a microbatch, m embeddings of its distinct media, i media tokens of a rank, H hidden size, D
layers after which features are added.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from automodel_rl.batch.tensors import move

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width, as counted by the model's image processor."""

Source = str | bytes | tuple[str, ...]
"""What media are read from: a file path, the file's bytes, or the paths of a video's frames."""

EncoderName = Literal["vision", "audio"]
"""Component that encodes a kind of media."""

Bidirectional = Literal["nowhere", "in windows", "everywhere"]
"""Layers in which an image's tokens attend to each other in both directions: none, those with sliding windows, or
all."""

ENCODERS: tuple[EncoderName, ...] = ("vision", "audio")
"""All encoders, in the order of their embeddings in a microbatch."""


@dataclass(frozen=True)
class Image:
    """An image in a sequence. Its tokens are consecutive.

    Attributes:
        start: index of its first token in the sequence, or in the microbatch.
        num_tokens: number of its tokens, row breaks included.
        grid: patches in time, height and width.
        pixels: output of the model's image processor for this image, or a picklable function that returns it, which is
            called on the rank that encodes the image, so that pixels are not sent between ranks.
        source: what the pixels are read from: a file path, or the file's bytes. Images of a microbatch with the same
            source and grid are encoded once. None if no other image has these pixels.
        row: number of embedding tokens per row of the image, each row followed by one text token as a break; 0 if there
            are no breaks.
        bidirectional: layers in which its tokens attend to each other in both directions, as in Gemma 3. They never
            attend to tokens after the image.
        framed: whether the model's image processor also writes the tokens before and after it.

    Example:
        >>> import torch
        >>> image = Image(start=3, num_tokens=16, grid=(1, 4, 4), pixels=torch.zeros(3, 56, 56))
        >>> image.load().shape
        torch.Size([3, 56, 56])
    """

    encoder: ClassVar[EncoderName] = "vision"
    plural: ClassVar[str] = "images"

    start: int
    num_tokens: int
    grid: Grid
    pixels: Tensor | Callable[[], Tensor]
    source: Source | None = None
    row: int = 0
    bidirectional: Bidirectional = "nowhere"
    framed: bool = False

    @property
    def num_embeddings(self) -> int:
        """Number of its tokens that are replaced by embeddings."""
        return self.num_tokens // (self.row + 1) * self.row if self.row else self.num_tokens

    @property
    def places(self) -> np.ndarray:
        """Indices of these tokens relative to its first token, int64 [num_embeddings]."""
        every = np.arange(self.num_tokens)
        return every[every % (self.row + 1) < self.row] if self.row else every

    @property
    def size(self) -> tuple[int, ...]:
        """The grid."""
        return self.grid

    def load(self) -> Tensor:
        """Returns the image's pixels, on the host."""
        return self.pixels() if callable(self.pixels) else self.pixels

    def moved(self, places: int) -> Self:
        """Returns the image shifted by `places` tokens."""
        return dataclasses.replace(self, start=self.start + places)


@dataclass(frozen=True)
class Video(Image):
    """A video in a sequence: an image whose grid has several patches in time.

    Attributes:
        start, num_tokens, grid, pixels, row, bidirectional, framed: see `Image`.
        source: files of its frames.
        interval: distance in rotary positions between patches in time, rounded down after summing (M-RoPE with absolute
            time, arXiv:2502.13923, section 2.1.3).

    Example:
        >>> import torch
        >>> video = Video(start=3, num_tokens=8, grid=(2, 4, 4), pixels=torch.zeros(32, 1176), interval=4.0)
        >>> video.size
        (2, 4, 4)
    """

    plural: ClassVar[str] = "videos"

    interval: float = 1.0


@dataclass(frozen=True)
class Audio:
    """An audio clip in a sequence. Its tokens are consecutive.

    Attributes:
        start, source: see `Image`.
        num_tokens: number of its tokens, each replaced by an embedding.
        num_frames: frames of its spectrogram, without silent padding.
        features: output of the model's feature extractor for this clip, a log-mel spectrogram [mels, frames], or a
            picklable function that returns it, which is called on the rank that encodes the clip.

    Example:
        >>> import torch
        >>> clip = Audio(start=3, num_tokens=25, num_frames=100, features=torch.zeros(128, 3000))
        >>> clip.load().shape
        torch.Size([128, 3000])
    """

    encoder: ClassVar[EncoderName] = "audio"
    plural: ClassVar[str] = "clips"
    bidirectional: ClassVar[Bidirectional] = "nowhere"

    start: int
    num_tokens: int
    num_frames: int
    features: Tensor | Callable[[], Tensor]
    source: Source | None = None

    @property
    def num_embeddings(self) -> int:
        """Number of its tokens that are replaced by embeddings."""
        return self.num_tokens

    @property
    def places(self) -> np.ndarray:
        """Indices of these tokens relative to its first token, int64 [num_embeddings]."""
        return np.arange(self.num_tokens)

    @property
    def size(self) -> tuple[int, ...]:
        """The number of frames."""
        return (self.num_frames,)

    def load(self) -> Tensor:
        """Returns the clip's features, on the host."""
        return self.features() if callable(self.features) else self.features

    def moved(self, places: int) -> Self:
        """Returns the clip shifted by `places` tokens."""
        return dataclasses.replace(self, start=self.start + places)


Media = Image | Audio
"""An item to be encoded."""


@dataclass(frozen=True)
class MediaTokens:
    """The media tokens among a rank's tokens, and the embeddings that replace them before the first layer.

    Attributes:
        places: indices of the media tokens among this rank's tokens, int64 [i].
        rows: row of `embeddings` for each of these tokens, int64 [i].
        embeddings: waits for and returns the embeddings of the microbatch's distinct media, encoder by encoder, with
            features that are added later, [m, (1 + D) * H]; None on ranks that do not use them.
    """

    places: Tensor
    rows: Tensor
    embeddings: Callable[[], Tensor] | None = None

    def to(self, device: torch.device) -> "MediaTokens":
        """Moves `places` and `rows` to `device`. Embeddings are already there."""
        return dataclasses.replace(self, places=move(self.places, device), rows=move(self.rows, device))

    def within(self, start: int, stop: int) -> "MediaTokens":
        """Returns the tokens from `start` up to `stop`, with indices relative to `start`."""
        inside = (self.places >= start) & (self.places < stop)
        return dataclasses.replace(self, places=self.places[inside] - start, rows=self.rows[inside])

    def put_into(self, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Replaces the embeddings of media tokens in `hidden`, [1, t, H]. Also returns the features to add to media
        tokens after each of the first D layers, [i, H]."""
        assert self.embeddings is not None
        # Sequences may share media. Indexing sums their gradients in a fixed order; index_select would not on CUDA.
        found, *features = self.embeddings()[self.rows].split(hidden.shape[-1], dim=1)
        return hidden.squeeze(0).index_copy(0, self.places, found).unsqueeze(0), features

    def add_to(self, hidden: Tensor, features: Tensor) -> Tensor:
        """Adds features [i, H] to the hidden states [1, t, H] of the media tokens."""
        return hidden.index_add(1, self.places, features[None])


NO_MEDIA = MediaTokens(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def check_media(media: Sequence[Media], num_tokens: int) -> None:
    """Raises ValueError if media of a sequence overlap, are out of order, or exceed the sequence."""
    end = 0
    for number, item in enumerate(media):
        if item.start < end or item.num_tokens < 1 or item.start + item.num_tokens > num_tokens:
            raise ValueError(
                f"media {number} has tokens {item.start} to {item.start + item.num_tokens - 1} of {num_tokens}: images "
                "and clips must lie within the sequence, in order and without overlap"
            )
        end = item.start + item.num_tokens


def distinct_media(media: Sequence[Media], encoder: EncoderName) -> tuple[Media, ...]:
    """Returns a microbatch's media of one encoder in order, without duplicates in content."""
    first: dict[Hashable, Media] = {}
    for number, item in enumerate(media):
        if item.encoder == encoder:
            first.setdefault(_identity(number, item), item)
    return tuple(first.values())


def media_places(media: Sequence[Media], num_tokens: int) -> np.ndarray:
    """Returns the embedding row of each token among the microbatch's distinct media, encoder by encoder; -1 for text;
    int64 [T]."""
    rows = np.full(num_tokens, -1)
    first: dict[Hashable, int] = {}
    seen = 0
    for number, item in sorted(enumerate(media), key=lambda pair: ENCODERS.index(pair[1].encoder)):
        start = first.setdefault(_identity(number, item), seen)
        seen += item.num_embeddings if start == seen else 0
        rows[item.start + item.places] = np.arange(start, start + item.num_embeddings)
    return rows


def _identity(number: int, item: Media) -> Hashable:
    """Returns a key that is equal for media with the same content."""
    return number if item.source is None else (item.encoder, item.source, item.size)


def single_media_tokens(token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """Collapses the tokens of each image and clip to a single token, as written by a chat template."""
    rest = {place for item in media for place in range(item.start + 1, item.start + item.num_tokens)}
    return [token for place, token in enumerate(token_ids) if place not in rest]


@dataclass(frozen=True)
class RotaryGrid:
    """How rotary positions follow the grids of images and videos.

    Attributes:
        merge: number of patches per token, along height and along width.
        text_follows_time: whether the text after a video continues from its largest position in time, if that exceeds
            those of height and width.
    """

    merge: int
    text_follows_time: bool = False


def multimodal_positions(media: Sequence[Media], lengths: Sequence[int], rotary: RotaryGrid) -> Tensor:
    """Computes rotary positions in time, height and width (M-RoPE, arXiv:2409.12191, section 2.1), int64 [3, T], for
    the microbatch's media in order, and the tokens of each sequence.

    A text token's position is one more than the previous position, on all three axes. An image's tokens add their grid
    coordinates to the position at which the image begins. Text after an image continues from the largest position in
    height and width; after a video, optionally in time. A video's patches in time are `interval` apart. Audio counts
    like text. Every sequence starts at 0.
    """
    merge = rotary.merge
    pieces: list[np.ndarray] = []
    start, left = 0, [item for item in media if isinstance(item, Image)]
    for length in lengths:
        position, done = 0, start
        while left and left[0].start < start + length:
            image = left.pop(0)
            pieces.append(np.tile(position + np.arange(image.start - done), (3, 1)))
            position += image.start - done
            time, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
            places = np.indices((time, height, width)).reshape(3, -1)
            if isinstance(image, Video):
                places[0] = places[0].astype(np.float32) * np.float32(image.interval)  # rounded as by transformers
            pieces.append(places + position)
            position += max(height, width, int(places[0].max()) + 1 if rotary.text_follows_time else 0)
            done = image.start + image.num_tokens
        pieces.append(np.tile(position + np.arange(start + length - done), (3, 1)))
        start += length
    return torch.from_numpy(np.concatenate(pieces, axis=1))
