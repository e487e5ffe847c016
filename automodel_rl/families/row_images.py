"""Encoders of images of any size, one at a time, with a text token after each row of image tokens: Pixtral's
(arXiv:2410.07073)."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName, Image, Media
from automodel_rl.families.encoder import EncoderFamily, MediaReader, ReadingOptions
from automodel_rl.media.images import ImageReader, PictureSource


@dataclass(frozen=True, kw_only=True)
class RowImages(EncoderFamily):
    """An encoder that takes images of any size, one at a time."""

    component: ClassVar[EncoderName] = "vision"
    breaks: ClassVar[tuple[str, str] | None] = ("[IMG_BREAK]", "[IMG_END]")
    is_unbatched: ClassVar[bool] = True

    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        (image,) = loaded
        side = _token_side(config)
        copies = 2 if image.shape[-2:] == (side, side) else 1  # transformers 5.18 drops a dim for a single token
        sizes = torch.tensor([image.shape[-2:]] * copies)
        return model.get_image_features(torch.stack([image] * copies), image_sizes=sizes).pooler_output[0]

    def blank(self, config: PretrainedConfig) -> Image:
        merge, side = _merge(config), _token_side(config)
        pixels = functools.partial(torch.zeros, config.vision_config.num_channels, side, side)
        return Image(0, 2, (1, merge, merge), pixels, row=1)

    def shape(self, config: PretrainedConfig, item: Media) -> tuple[int, ...]:
        vision = config.vision_config
        return vision.num_channels, *(patches * vision.patch_size for patches in item.size[1:])

    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        turns = hidden.new_empty(len(hidden), hidden.shape[1] // config.vision_config.num_attention_heads)
        return layer(hidden[None], attention_mask=None, position_embeddings=(turns, turns))

    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        pixels = [image.load().to(token_ids.device, dtype) for image in media]
        sizes = torch.tensor([picture.shape[-2:] for picture in pixels], device=token_ids.device)
        height, width = sizes.amax(0).tolist()
        padded = [pad(picture, (0, width - picture.shape[2], 0, height - picture.shape[1])) for picture in pixels]
        return {"pixel_values": torch.stack(padded), "image_sizes": sizes}

    def random(self, config: PretrainedConfig, generator: torch.Generator) -> dict[str, Callable[[], Media]]:
        merge, side = _merge(config), _token_side(config)

        def image() -> Image:
            height, width = torch.randint(1, 4, (2,), generator=generator).tolist()
            width += 1  # plain transformers fails on an image of one token
            channels = config.vision_config.num_channels
            pixels = torch.randn(channels, height * side, width * side, generator=generator)
            return Image(0, height * (width + 1), (1, height * merge, width * merge), pixels, row=width)

        return {"image": image}

    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        return {"image": RowReader(folder, config, options)}


class RowReader(ImageReader):
    """Reads images whose token rows each end with a break. See `ImageReader` for folder and config."""

    def __init__(self, folder: Path, config: PretrainedConfig, options: ReadingOptions):
        super().__init__(folder, config, options.pixels)
        self.breaks, self.merge, self.side = options.breaks, _merge(config), _token_side(config)

    def image(self, height: int, width: int, pixels: Callable[[], Tensor], source: PictureSource, where: str) -> Image:
        """Shrinks large images like Pixtral's image processor, then rounds up to whole tokens."""
        longest = self.processor.size["longest_edge"]
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((size - 1) // self.side + 1 for size in (height, width))
        grid = (1, rows * self.merge, columns * self.merge)
        return Image(0, rows * (columns + 1), grid, pixels, source, row=columns)

    def pixels(self, picture: Any) -> Tensor:
        made = self.processor(images=[picture], return_tensors="pt", patch_size=self.side)
        return torch.as_tensor(made["pixel_values"])[0]

    def token_ids(self, item: Media) -> Tensor:
        assert isinstance(item, Image)
        assert self.breaks is not None  # set by a chat tokenizer
        ids = super().token_ids(item)
        ids[item.row :: item.row + 1], ids[-1] = self.breaks
        return ids


def _merge(config: PretrainedConfig) -> int:
    """Side of a token in patches."""
    return config.to_dict().get("spatial_merge_size") or 1


def _token_side(config: PretrainedConfig) -> int:
    """Side of a token in pixels."""
    return _merge(config) * config.vision_config.patch_size
