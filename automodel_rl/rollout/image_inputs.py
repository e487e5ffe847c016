"""Images of prompts, as the copy of the model takes them: pixels, and positions that follow an image's grid."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from automodel_rl.batch import Image, multimodal_positions
from automodel_rl.data.images import ImageReader
from automodel_rl.generator_messages import PromptImage, Request
from automodel_rl.model.vision import rotary_merge
from automodel_rl.support.description import ImageForm, image_form

IN_A_PROMPT = "a prompt"
"""Place of an image in the data, for error messages. The trainer has opened it before."""


class ImageInputs:
    """Arguments of a transformers model for the images of prompts.

    Args:
        config: the config of the whole model.
        reader: reads pictures; None for a model that reads text only.
    """

    def __init__(self, config: PretrainedConfig, reader: ImageReader | None):
        self.reader, self.merge = reader, rotary_merge(config)
        self.form = None if reader is None else image_form(config)
        self.is_bidirectional = reader is not None and reader.blank.is_bidirectional

    def of(self, requests: Sequence[Request], ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments for the images of a batch, for the forward of its prompts.

        Args:
            requests: the batch, row by row.
            ids: token ids of the prompts, padded on the left to one length, on the device of the pixels.
            dtype: that of the pixels.
        """
        images = [image for request in requests for image in request.images]
        if not images:
            return {}
        assert self.reader is not None  # only such models have prompts with images
        device = ids.device
        pixels = [self.reader.pixels(image.source, IN_A_PROMPT).to(device, dtype) for image in images]
        if self.form is ImageForm.ANY_SIZE:
            sizes = torch.tensor([picture.shape[-2:] for picture in pixels], device=device)
            height, width = sizes.amax(0).tolist()
            padded = [pad(picture, (0, width - picture.shape[2], 0, height - picture.shape[1])) for picture in pixels]
            return {"pixel_values": torch.stack(padded), "image_sizes": sizes}
        if self.is_bidirectional:
            kinds = (ids == self.reader.token_id).long()
            return {"pixel_values": torch.stack(pixels), "token_type_ids": kinds}
        if self.form is ImageForm.ONE_SIZE:
            return {"pixel_values": torch.stack(pixels)}
        grids = torch.tensor([image.grid for image in images], device=device)
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": grids}

    def positions(self, requests: Sequence[Request], longest: int) -> Tensor:
        """Positions of the tokens of prompts padded on the left to one length: int64 [B, n], or [3, B, n] for a model
        with M-RoPE. Pads have 0."""
        axes = () if self.merge is None else (3,)
        positions = torch.zeros(*axes, len(requests), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            length = len(request.prompt)
            own = torch.arange(length)
            if self.merge is not None:
                own = multimodal_positions([self._image(image) for image in request.images], [length], self.merge)
            positions[..., row, longest - length :] = own
        return positions

    def _image(self, image: PromptImage) -> Image:
        assert self.reader is not None
        pixels = functools.partial(self.reader.pixels, image.source, IN_A_PROMPT)
        return Image(image.start, image.num_tokens, image.grid, pixels, image.source)


def next_positions(positions: Tensor) -> Tensor:
    """The positions of the tokens that come after the last ones: [B, 1], or [3, B, 1], the same on all axes."""
    last = positions[..., -1:]
    return last + 1 if last.ndim == 2 else last.amax(0, keepdim=True).expand_as(last) + 1


def prompt_images(images: Sequence[Image]) -> tuple[PromptImage, ...]:
    """A prompt's images as a generator gets them."""
    found = []
    for image in images:
        assert image.source is not None  # `ImageReader` has made it
        found.append(PromptImage(image.start, image.num_tokens, image.grid, image.source))
    return tuple(found)
