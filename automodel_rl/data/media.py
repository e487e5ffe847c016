"""Images and audio of chats, put into the token sequences that a chat template has written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch import Audio, Image, Media, TokenSequence, Video
from automodel_rl.data.audio import AudioReader
from automodel_rl.data.images import ImageReader
from automodel_rl.data.messages import Message, media_parts
from automodel_rl.data.videos import VideoReader
from automodel_rl.errors import InputError
from automodel_rl.support.encoders import MULTIMODAL_FAMILIES


class MediaReader(Protocol):
    """Reads one kind of media. It can be pickled."""

    token_id: int

    def __call__(self, source: Any, where: str) -> Media:
        """An image or clip that is not read yet."""
        ...

    def load(self, source: Any, where: str) -> Tensor:
        """What its encoder takes."""
        ...


class MediaReaders:
    """Reads the media of chats, each kind in the form that a model takes. It can be pickled.

    Args:
        of_parts: the readers by the type of a message's part, "image", "video" or "audio".
    """

    def __init__(self, of_parts: Mapping[str, MediaReader]):
        self.of_parts = of_parts

    @property
    def images(self) -> ImageReader | None:
        """The reader of images; None if the model sees none."""
        reader = self.of_parts.get("image")
        return reader if isinstance(reader, ImageReader) else None

    def read(self, messages: Sequence[Message], where: str) -> list[Media]:
        """The media of messages, in order. Their contents are not read yet.

        Args:
            messages: the messages, in which parts have their file under the key `path`.
            where: the chat's place in the data, for error messages.

        Raises:
            InputError: a file cannot be opened, or does not fit the model.
        """
        return [self.of_parts[part["type"]](part["path"], where) for part in media_parts(messages)]

    def expand(self, sequence: TokenSequence, media: Sequence[Media], where: str) -> TokenSequence:
        """A sequence in which each image and clip has all of its tokens. The chat template writes only one for each.

        Args:
            sequence: the tokens that the chat template wrote.
            media: the chat's media; those of one kind in order.
            where: the chat's place in the data, for error messages.

        Raises:
            InputError: the sequence has more or fewer tokens of a kind than there are media.
        """
        found: dict[int, Media] = {}
        for kind, reader in self.of_parts.items():
            places = (sequence.input_ids == reader.token_id).nonzero()[:, 0].tolist()
            own = [item for item in media if part_type(item) == kind]
            if len(places) != len(own):
                raise InputError(
                    f"{where}: the chat template writes {len(places)} {kind} tokens for {len(own)} parts of type "
                    f"{kind}: use a template that writes one for each, and no such token in texts"
                )
            found |= dict(zip(places, own, strict=True))
        ordered = sorted(found)
        counts = torch.ones_like(sequence.input_ids)
        counts[ordered] = torch.tensor([found[place].num_tokens for place in ordered], dtype=counts.dtype)
        starts = (counts.cumsum(0) - counts)[ordered].tolist()
        mask = sequence.loss_mask.clone()
        mask[ordered] = False
        ids = sequence.input_ids.repeat_interleave(counts)
        moved = tuple(found[place].moved(start) for place, start in zip(ordered, starts, strict=True))
        for item in moved:
            if isinstance(item, Image) and self.images is not None:
                self.images.write_breaks(ids, item)
        return TokenSequence(ids, mask.repeat_interleave(counts), media=moved)


def open_readers(
    folder: Path,
    config: PretrainedConfig,
    pixels: tuple[int | None, int | None] = (None, None),
    breaks: tuple[int, int] | None = None,
) -> MediaReaders | None:
    """The readers of a model's media; None for a model that reads text only.

    Args:
        folder: the checkpoint's folder, with its image processor or feature extractor.
        config: the config of the whole model.
        pixels, breaks: as of `ImageReader`.

    Raises:
        InputError: one of them cannot be opened.
    """
    family = MULTIMODAL_FAMILIES.get(config.model_type)
    if family is None:
        return None
    readers: dict[str, MediaReader] = {}
    if "vision" in family.encoders:
        readers["image"] = images = ImageReader(folder, config, pixels, breaks)
        if family.has_video_grid:
            readers["video"] = VideoReader(folder, config, images, pixels)
    if "audio" in family.encoders:
        readers["audio"] = AudioReader(folder, config)
    return MediaReaders(readers)


def part_type(item: Media) -> str:
    """The type of a message's part that stands for an item."""
    return "audio" if isinstance(item, Audio) else "video" if isinstance(item, Video) else "image"


def cut(sequence: TokenSequence, limit: int) -> TokenSequence:
    """The first `limit` tokens of a sequence, or fewer if an image or clip would be cut in two: then the sequence ends
    before it."""
    whole = [item for item in sequence.media if item.start + item.num_tokens <= limit]
    if len(whole) < len(sequence.media):
        limit = min(limit, sequence.media[len(whole)].start)
    return TokenSequence(sequence.input_ids[:limit], sequence.loss_mask[:limit], media=tuple(whole))
