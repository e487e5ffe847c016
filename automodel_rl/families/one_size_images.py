"""Encoders of images of one size: CLIP's and SigLIP's."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName, Image, Media
from automodel_rl.families.encoder import EncoderFamily, MediaReader, ReadingOptions
from automodel_rl.media.images import ImageReader, PictureSource
from automodel_rl.parallel.tensor_parallel import COLUMNS, ROWS

PROJECTOR = "multi_modal_projector"

CLIP_PLAN = (
    *((f"self_attn.{name}_proj", COLUMNS) for name in ("q", "k", "v")),
    ("self_attn.out_proj", ROWS),
    ("mlp.fc1", COLUMNS),
    ("mlp.fc2", ROWS),
)
"""Tensor-parallel styles of CLIP's and SigLIP's layers."""


@dataclass(frozen=True, kw_only=True)
class OneSizeImages(EncoderFamily):
    """An encoder that takes a batch of images of one size.

    Attributes:
        has_class_token: whether a class token precedes the patches.
    """

    component: ClassVar[EncoderName] = "vision"

    has_class_token: bool = False

    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        return torch.cat(list(model.get_image_features(torch.stack(list(loaded))).pooler_output))

    def blank(self, config: PretrainedConfig) -> Image:
        vision = config.vision_config
        side = vision.image_size
        grid = (1, side // vision.patch_size, side // vision.patch_size)
        pixels = functools.partial(torch.zeros, vision.num_channels, side, side)  # picklable, and no tensor yet
        tokens = config.to_dict().get("mm_tokens_per_image")
        if tokens is None:
            # "default" drops the first token, whatever it is.
            is_cut = config.vision_feature_select_strategy == "default"
            tokens = math.prod(grid) + self.has_class_token - is_cut
        return Image(0, tokens, grid, pixels, bidirectional=self.bidirectional(config))

    def shape(self, config: PretrainedConfig, item: Media) -> tuple[int, ...]:
        vision = config.vision_config
        return vision.num_channels, vision.image_size, vision.image_size

    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        return layer(hidden[None], attention_mask=None)

    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        return {"pixel_values": torch.stack([image.load().to(token_ids.device, dtype) for image in media])}

    def random(self, config: PretrainedConfig, generator: torch.Generator) -> dict[str, Callable[[], Media]]:
        blank = self.blank(config)
        noise = functools.partial(torch.randn, self.shape(config, blank), generator=generator)
        return {"image": lambda: dataclasses.replace(blank, pixels=noise())}

    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        return {"image": OneSizeReader(folder, config, self.blank(config), options.pixels)}


class OneSizeReader(ImageReader):
    """Reads images at the size of `blank`."""

    def __init__(self, folder: Path, config: PretrainedConfig, blank: Image, limits: tuple[int | None, int | None]):
        super().__init__(folder, config, limits)
        self.blank = blank

    def image(self, height: int, width: int, pixels: Callable[[], Tensor], source: PictureSource, where: str) -> Image:
        return dataclasses.replace(self.blank, pixels=pixels, source=source)
