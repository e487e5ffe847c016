"""InternVL 3 and 3.5 in transformers' naming (arXiv:2504.10479): InternViT over the tiles of an image, with four
neighbouring patches per token, and a text model of another family."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName, Image, Media
from automodel_rl.families.encoder import EncoderFamily, MediaReader, ReadingOptions
from automodel_rl.families.file_names import ExpertNames, parts_apart
from automodel_rl.families.multimodal import TEXT_MODELS, Multimodal
from automodel_rl.families.one_size_images import PROJECTOR
from automodel_rl.media.images import ImageReader, PictureSource
from automodel_rl.parallel.tensor_parallel import COLUMNS, ROWS

TILES = {"crop_to_patches": True}
"""Option that transformers' processor of the whole model passes to the image processor, regardless of its config
file."""


@dataclass(frozen=True, kw_only=True)
class TileImages(EncoderFamily):
    """An encoder that takes an image as tiles of one size. In an image's grid, tiles take the place of time."""

    component: ClassVar[EncoderName] = "vision"

    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        strategy, layer = config.vision_feature_select_strategy, config.vision_feature_layer
        output = model.get_image_features(
            torch.cat(list(loaded)), vision_feature_layer=layer, vision_feature_select_strategy=strategy
        )
        return output.pooler_output.flatten(0, 1)

    def blank(self, config: PretrainedConfig) -> Image:
        return image_of_tiles(config, 1)

    def shape(self, config: PretrainedConfig, item: Media) -> tuple[int, ...]:
        return item.size[0], config.vision_config.num_channels, *config.vision_config.image_size

    def num_positions(self, config: PretrainedConfig, item: Media) -> int:
        """Number of patches, plus one position per tile."""
        return math.prod(item.size) + item.size[0]

    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        return layer(hidden[None])

    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        return {"pixel_values": torch.cat([image.load().to(token_ids.device, dtype) for image in media])}

    def random(self, config: PretrainedConfig, generator: torch.Generator) -> dict[str, Callable[[], Media]]:
        def image() -> Image:
            blank = image_of_tiles(config, int(torch.randint(1, 4, (1,), generator=generator)))
            return replace(blank, pixels=torch.randn(self.shape(config, blank), generator=generator))

        return {"image": image}

    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        return {"image": TileReader(folder, config, options.pixels)}


def image_of_tiles(config: PretrainedConfig, num_tiles: int) -> Image:
    """Returns a blank image of `num_tiles` tiles."""
    vision = config.vision_config
    height, width = (side // patch for side, patch in zip(vision.image_size, vision.patch_size, strict=True))
    pixels = functools.partial(torch.zeros, num_tiles, vision.num_channels, *vision.image_size)
    tokens = num_tiles * int(height * config.downsample_ratio) * int(width * config.downsample_ratio)
    return Image(0, tokens, (num_tiles, height, width), pixels, framed=True)


class TileReader(ImageReader):
    """Reads images as tiles, with an additional tile of the whole image if there are several."""

    def __init__(self, folder: Path, config: PretrainedConfig, limits: tuple[int | None, int | None]):
        super().__init__(folder, config, limits)
        self.config = config

    def image(self, height: int, width: int, pixels: Callable[[], Tensor], source: PictureSource, where: str) -> Image:
        num_tiles = self.processor.get_number_of_image_patches(height, width, TILES)
        return replace(image_of_tiles(self.config, num_tiles), pixels=pixels, source=source)

    def pixels(self, picture: Any) -> Tensor:
        return torch.as_tensor(self.processor(images=[picture], return_tensors="pt", **TILES)["pixel_values"])


_PARTS_APART = parts_apart("vision_tower")

INTERNVL = Multimodal(
    encoders={
        "vision": (
            TileImages(
                model_types=("internvl_vision",),
                title="InternVL's encoder",
                modules=("vision_tower", PROJECTOR),
                projectors=(PROJECTOR,),
                tp_plan=(("mlp.fc1", COLUMNS), ("mlp.fc2", ROWS)),
                computes_in_fp32=True,  # norms of the encoder with 6B parameters
            ),
        )
    },
    file_names=(
        _PARTS_APART,
        replace(_PARTS_APART, experts=ExpertNames(), identifying_pattern=r"\.mlp\.experts\.0\."),  # a mixture
    ),
    languages=(*TEXT_MODELS, "qwen3_moe"),
    image_text=("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>"),
)
