"""Media of prompts, as the copy of the model takes them: pixels, spectrograms, and positions that follow an image's
grid."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from automodel_rl.batch import Audio, Image, Media, Video, multimodal_positions
from automodel_rl.data.images import ImageReader
from automodel_rl.data.media import MediaReaders, part_type
from automodel_rl.generator_messages import PromptMedia, Request
from automodel_rl.model.audio import clip_arguments
from automodel_rl.model.vision import rotary_grid
from automodel_rl.support.description import ImageForm

IN_A_PROMPT = "a prompt"
"""Place of an image or clip in the data, for error messages. The trainer has opened it before."""


class MediaInputs:
    """Arguments of a transformers model for the media of prompts.

    Args:
        config: the config of the whole model.
        readers: read files; None for a model that reads text only.
    """

    def __init__(self, config: PretrainedConfig, readers: MediaReaders | None):
        self.readers, self.rotary = readers, rotary_grid(config)

    def of(self, requests: Sequence[Request], ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments for the media of a batch, for the forward of its prompts.

        Args:
            requests: the batch, row by row.
            ids: token ids of the prompts, padded on the left to one length, on the device of the pixels.
            dtype: that of pixels and spectrograms.
        """
        media = [self._item(item) for request in requests for item in request.media]
        videos = [item for item in media if isinstance(item, Video)]
        images = [item for item in media if isinstance(item, Image) and not isinstance(item, Video)]
        clips = [item for item in media if isinstance(item, Audio)]
        found: dict[str, Tensor] = {}
        if images:
            assert self.readers is not None  # only such models have prompts with images
            assert self.readers.images is not None
            found |= _of_images(self.readers.images, images, ids, dtype)
        if videos:
            pixels = torch.cat([video.load().to(ids.device, dtype) for video in videos])
            grids = torch.tensor([video.grid for video in videos], device=ids.device)
            found |= {"pixel_values_videos": pixels, "video_grid_thw": grids}
        if clips:
            spectrograms = [clip.load().to(ids.device, dtype) for clip in clips]
            found |= clip_arguments(spectrograms, [clip.num_frames for clip in clips])
        return found

    def positions(self, requests: Sequence[Request], longest: int) -> Tensor:
        """Positions of the tokens of prompts padded on the left to one length: int64 [B, n], or [3, B, n] for a model
        with M-RoPE. Pads have 0."""
        axes = () if self.rotary is None else (3,)
        positions = torch.zeros(*axes, len(requests), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            length = len(request.prompt)
            own = torch.arange(length)
            if self.rotary is not None:
                own = multimodal_positions([self._item(item) for item in request.media], [length], self.rotary)
            positions[..., row, longest - length :] = own
        return positions

    def _item(self, item: PromptMedia) -> Media:
        assert self.readers is not None
        load = functools.partial(self.readers.load, item.kind, item.source, item.size, IN_A_PROMPT)
        if item.kind == "audio":
            (num_frames,) = item.size
            return Audio(item.start, item.num_tokens, num_frames, load, item.source)
        time, height, width = item.size
        grid = (time, height, width)
        if item.kind == "video":
            return Video(item.start, item.num_tokens, grid, load, item.source, interval=item.interval)
        return Image(item.start, item.num_tokens, grid, load, item.source)


def _of_images(reader: ImageReader, images: Sequence[Image], ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments for images. The others are those of `MediaInputs.of`."""
    device = ids.device
    pixels = [image.load().to(device, dtype) for image in images]
    if reader.form is ImageForm.ANY_SIZE:
        sizes = torch.tensor([picture.shape[-2:] for picture in pixels], device=device)
        height, width = sizes.amax(0).tolist()
        padded = [pad(picture, (0, width - picture.shape[2], 0, height - picture.shape[1])) for picture in pixels]
        return {"pixel_values": torch.stack(padded), "image_sizes": sizes}
    if reader.blank.is_bidirectional:
        return {"pixel_values": torch.stack(pixels), "token_type_ids": (ids == reader.token_id).long()}
    if reader.form is ImageForm.ONE_SIZE:
        return {"pixel_values": torch.stack(pixels)}
    grids = torch.tensor([image.grid for image in images], device=device)
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": grids}


def next_positions(positions: Tensor) -> Tensor:
    """The positions of the tokens that come after the last ones: [B, 1], or [3, B, 1], the same on all axes."""
    last = positions[..., -1:]
    return last + 1 if last.ndim == 2 else last.amax(0, keepdim=True).expand_as(last) + 1


def prompt_media(media: Sequence[Media]) -> tuple[PromptMedia, ...]:
    """A prompt's media as a generator gets them."""
    found = []
    for item in media:
        assert item.source is not None  # a `MediaReader` has made it
        interval = item.interval if isinstance(item, Video) else 1.0
        found.append(PromptMedia(part_type(item), item.start, item.num_tokens, item.size, item.source, interval))
    return tuple(found)
