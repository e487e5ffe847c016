"""Encoders that take images and videos of any size as flattened patches, with the grid of each: Qwen's."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import EncoderName, Image, Media, Video
from automodel_rl.errors import InputError
from automodel_rl.families.encoder import EncoderFamily, MediaReader, ReadingOptions
from automodel_rl.media.images import ImageReader, PictureSource
from automodel_rl.media.videos import VideoReader
from automodel_rl.parallel.tensor_parallel import FUSED_THREE, ROWS

FUSED_ATTENTION = (("attn.qkv", FUSED_THREE), ("attn.proj", ROWS))
"""Tensor-parallel styles of attention in Qwen's encoders."""


class PatchReader(ImageReader):
    """Reads images as patches."""

    def image(self, height: int, width: int, pixels: Callable[[], Tensor], source: PictureSource, where: str) -> Image:
        patch, merge = self.processor.patch_size, self.processor.merge_size
        try:
            height, width = self.resized(height, width, patch * merge)
        except ValueError as error:
            raise InputError(f"{where}: the model's image processor refuses an image ({error})") from None
        grid = (1, height // patch, width // patch)
        return Image(0, grid[1] * grid[2] // merge**2, grid, pixels, source)

    def resized(self, height: int, width: int, factor: int) -> tuple[int, int]:
        """Returns the height and width to which the model's image processor resizes an image, or raises ValueError if
        it refuses the size. `factor` is the side of a token in pixels."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # as in media/images.py

        limits = self.processor.size
        return smart_resize(height, width, factor, limits["shortest_edge"], limits["longest_edge"])

    def pixels(self, picture: Any) -> Tensor:
        return torch.as_tensor(self.processor(images=[picture], return_tensors="pt")["pixel_values"])


@dataclass(frozen=True, kw_only=True)
class PatchImages(EncoderFamily):
    """An encoder that takes flattened patches of images of any size, with the grid of each.

    Attributes:
        reader: reader of images.
        videos: reader of videos, as one grid over time, or as separate patches in time that each follow a timestamp;
            None if videos are not supported.
    """

    component: ClassVar[EncoderName] = "vision"
    has_pixel_limits: ClassVar[bool] = True

    varlen_module: str = "visual"
    reader: type[PatchReader] = PatchReader
    videos: type[VideoReader] | None = None

    @property
    def reads_videos(self) -> bool:
        return self.videos is not None

    def num_deepstack(self, config: PretrainedConfig) -> int:
        return len(config.vision_config.to_dict().get("deepstack_visual_indexes") or ())

    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        grid = torch.tensor([item.size for item in media], device=loaded[0].device)
        output = model.get_image_features(torch.cat(list(loaded)), grid)
        features = output.deepstack_features if self.num_deepstack(config) else []
        return torch.cat([torch.cat(list(of_images)) for of_images in (output.pooler_output, *features)], dim=1)

    def blank(self, config: PretrainedConfig) -> Image:
        merge = config.vision_config.spatial_merge_size
        grid = (1, merge, merge)
        return Image(0, 1, grid, functools.partial(torch.zeros, *_patches_shape(config, grid)))

    def shape(self, config: PretrainedConfig, item: Media) -> tuple[int, ...]:
        return _patches_shape(config, item.size)

    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        turns = hidden.new_empty(len(hidden), hidden.shape[1] // config.vision_config.num_heads)
        bounds = hidden.new_empty(2, dtype=torch.int32)
        return layer(hidden, cu_seqlens=bounds, max_seqlen=len(hidden), position_embeddings=(turns, turns))

    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        videos = [item for item in media if isinstance(item, Video)]
        images = [item for item in media if not isinstance(item, Video)]
        for items, pixels, grids in (
            (images, "pixel_values", "image_grid_thw"),
            (videos, "pixel_values_videos", "video_grid_thw"),
        ):
            if items:
                found[pixels] = torch.cat([item.load().to(token_ids.device, dtype) for item in items])
                found[grids] = torch.tensor([item.size for item in items], device=token_ids.device)
        return found

    def random(self, config: PretrainedConfig, generator: torch.Generator) -> dict[str, Callable[[], Media]]:
        merge = config.vision_config.spatial_merge_size

        def image() -> Image:
            height, width = torch.randint(1, 4, (2,), generator=generator).tolist()
            grid = (1, height * merge, width * merge)
            return Image(0, height * width, grid, torch.randn(_patches_shape(config, grid), generator=generator))

        def video() -> Video:
            """Two or three patches in time; one if they are separate."""
            of_one = image()
            time = int(torch.randint(2, 4, (1,), generator=generator)) if self.videos is VideoReader else 1
            interval = float(torch.rand(1, generator=generator) * 3)
            grid = (time, *of_one.grid[1:])
            pixels = torch.randn(_patches_shape(config, grid), generator=generator)
            return Video(0, time * of_one.num_tokens, grid, pixels, interval=interval)

        return {"image": image, "video": video} if self.reads_videos else {"image": image}

    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        images = self.reader(folder, config, options.pixels)
        if self.videos is None:
            return {"image": images}
        return {"image": images, "video": self.videos(folder, config, images, options.pixels)}


def _patches_shape(config: PretrainedConfig, grid: Sequence[int]) -> tuple[int, int]:
    """Shape of the patches of an image with a grid in time, height and width."""
    vision = config.vision_config
    return math.prod(grid), vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
