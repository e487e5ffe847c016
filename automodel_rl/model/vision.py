"""The encoder of images: pixels in, embeddings of the language model out."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch import Image
from automodel_rl.batch.media import Media, RotaryGrid
from automodel_rl.model.encoder import EncoderPart
from automodel_rl.model.varlen import choose_varlen
from automodel_rl.support.description import ImageForm, image_form, num_deepstack
from automodel_rl.support.encoders import MULTIMODAL_FAMILIES


class VisionPart(EncoderPart):
    """The encoder of images with its projector.

    Args:
        whole: transformers' model for conditional generation.
    """

    name = "vision"

    def __init__(self, whole: Any):
        super().__init__(whole)
        self.form = image_form(self.config)
        self.one_by_one = self.form is ImageForm.ANY_SIZE

    def forward(self, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        """Embeddings of the tokens of all images, in order.

        Args:
            loaded: the pixels of each image, as the image processor gives them, on the device and in the compute dtype.
            media: the images.

        Returns:
            [m, H] in the compute dtype, or [m, (1 + D) * H] if features follow each embedding (batch/media.py).
        """
        if self.form is ImageForm.PATCHES:
            grid = torch.tensor([item.size for item in media], device=loaded[0].device)
            output = self.model.get_image_features(torch.cat(list(loaded)), grid)
            features = output.deepstack_features if num_deepstack(self.config) else []
            return torch.cat([torch.cat(list(of_images)) for of_images in (output.pooler_output, *features)], dim=1)
        if self.form is ImageForm.ANY_SIZE:
            (image,) = loaded  # one by one (encoder/encoding.py)
            return self._alone(image)
        return torch.cat(list(self.model.get_image_features(torch.stack(list(loaded))).pooler_output))

    def _alone(self, image: Tensor) -> Tensor:
        """The embeddings of one image [C, H, W]."""
        side = token_patches(self.config) * self.config.vision_config.patch_size
        copies = 2 if image.shape[-2:] == (side, side) else 1  # transformers 5.18 loses a dim of a single token
        sizes = torch.tensor([image.shape[-2:]] * copies)
        return self.model.get_image_features(torch.stack([image] * copies), image_sizes=sizes).pooler_output[0]

    def blank(self) -> Image:
        """The smallest image."""
        return blank_image(self.config)

    def shape(self, item: Media) -> tuple[int, ...]:
        """The shape of an image's pixels."""
        assert isinstance(item, Image)
        return pixel_shape(self.config, self.blank(), item.grid)

    def choose_attention(self, device: torch.device, dtype: torch.dtype) -> None:
        """Makes an encoder of images of different sizes compute attention in one call for all, in bfloat16 on CUDA."""
        if self.form is ImageForm.PATCHES:
            choose_varlen(self.model.visual.config, device, dtype)


def blank_image(config: PretrainedConfig) -> Image:
    """The smallest image of a model.

    Args:
        config: the config of the whole model.
    """
    vision = config.vision_config
    if image_form(config) is ImageForm.PATCHES:
        size = token_patches(config)
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return Image(0, 1, (1, size, size), functools.partial(torch.zeros, size * size, patch))
    if image_form(config) is ImageForm.ANY_SIZE:
        merge = token_patches(config)
        side = merge * vision.patch_size
        return Image(0, 2, (1, merge, merge), functools.partial(torch.zeros, vision.num_channels, side, side), row=1)
    side = vision.image_size
    grid = side // vision.patch_size
    pixels = functools.partial(torch.zeros, vision.num_channels, side, side)  # no tensor: it can be pickled
    pooled = config.to_dict().get("mm_tokens_per_image")
    if pooled is not None:
        is_bidirectional = MULTIMODAL_FAMILIES[config.model_type].is_bidirectional
        return Image(0, pooled, (1, grid, grid), pixels, is_bidirectional=is_bidirectional)
    has_class_token = vision.model_type == "clip_vision_model"  # "default" leaves out the first token, whatever it is
    tokens = grid * grid + has_class_token - (config.vision_feature_select_strategy == "default")
    return Image(0, tokens, (1, grid, grid), pixels)


def pixel_shape(config: PretrainedConfig, blank: Image, grid: tuple[int, int, int]) -> tuple[int, ...]:
    """The shape of an image's pixels by its grid.

    Args:
        config: the config of the whole model.
        blank: the model's `blank_image`.
        grid: its patches in time, height and width.
    """
    shape = blank.load().shape
    if image_form(config) is ImageForm.PATCHES:
        return math.prod(grid), shape[1]
    if image_form(config) is ImageForm.ANY_SIZE:
        return shape[0], *(patches * config.vision_config.patch_size for patches in grid[1:])
    return tuple(shape)


def token_patches(config: PretrainedConfig) -> int:
    """Patches in a token along height, and along width.

    Args:
        config: the config of the whole model.
    """
    values = config.to_dict()
    return values["vision_config"].get("spatial_merge_size") or values.get("spatial_merge_size") or 1


def rotary_grid(config: PretrainedConfig) -> RotaryGrid | None:
    """How rotary positions follow the grids of images; None if they do not.

    Args:
        config: the config of the whole model.
    """
    family = MULTIMODAL_FAMILIES.get(config.model_type)
    if family is None or not family.has_rotary_grid:
        return None
    return RotaryGrid(config.vision_config.spatial_merge_size, family.text_follows_time)
