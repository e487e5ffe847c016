"""Gemma 4 with images: patches of images of any size, with their coordinates. Its encoder pools neighbouring patches
into a token; the unified model projects them without an encoder.

Tokens of an image attend to each other in both directions in layers with sliding windows, if the language model's
config says so. Its audio encoder is not trained.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from automodel_rl.batch.media import Bidirectional, EncoderName, Image, Media
from automodel_rl.errors import InputError
from automodel_rl.families.encoder import EncoderFamily, MediaReader, ReadingOptions
from automodel_rl.families.file_names import FileNames
from automodel_rl.families.multimodal import Multimodal
from automodel_rl.families.text import NORMS_OF_HEADS
from automodel_rl.media.images import ImageReader, PictureSource
from automodel_rl.parallel.tensor_parallel import COLUMNS, ROWS

COLOURS = 3


@dataclass(frozen=True, kw_only=True)
class PlacedPatches(EncoderFamily):
    """An encoder that takes an image's patches with the coordinates of each.

    Attributes:
        merges_pixels: whether the patches of a token are merged into one by the image processor.
    """

    component: ClassVar[EncoderName] = "vision"
    is_unbatched: ClassVar[bool] = True

    merges_pixels: bool = False

    def bidirectional(self, config: PretrainedConfig) -> Bidirectional:
        return "in windows" if config.text_config.use_bidirectional_attention == "vision" else "nowhere"

    def _patch_size(self, config: PretrainedConfig) -> int:
        """Number of values of a patch."""
        vision = config.vision_config
        side = vision.patch_size * (vision.pooling_kernel_size if self.merges_pixels else 1)
        return COLOURS * side**2

    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        (patches,), (image,) = loaded, media
        return torch.cat(model.get_image_features(patches[None], _places(image, patches.device)[None]).pooler_output)

    def blank(self, config: PretrainedConfig) -> Image:
        side = 1 if self.merges_pixels else config.vision_config.pooling_kernel_size
        pixels = functools.partial(torch.zeros, side**2, self._patch_size(config))
        return Image(0, 1, (1, side, side), pixels, bidirectional=self.bidirectional(config), framed=True)

    def shape(self, config: PretrainedConfig, item: Media) -> tuple[int, ...]:
        return math.prod(item.size), self._patch_size(config)

    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        places = hidden.new_empty(1, len(hidden), 2)
        turns = hidden.new_empty(1, len(hidden), config.vision_config.head_dim)
        return layer(hidden[None], position_embeddings=(turns, turns), position_ids=places)

    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        longest = max(math.prod(item.size) for item in media)
        left = [longest - math.prod(item.size) for item in media]
        patches = [item.load().to(token_ids.device, dtype) for item in media]
        places = [_places(item, token_ids.device) for item in media]
        return {
            "pixel_values": torch.stack([pad(p, (0, 0, 0, n)) for p, n in zip(patches, left, strict=True)]),
            "image_position_ids": torch.stack(
                [pad(p, (0, 0, 0, n), value=-1) for p, n in zip(places, left, strict=True)]
            ),
            "mm_token_type_ids": (token_ids == config.image_token_id).long(),
        }

    def random(self, config: PretrainedConfig, generator: torch.Generator) -> dict[str, Callable[[], Media]]:
        def image() -> Image:
            sized = _of_tokens(self.blank(config), *torch.randint(1, 4, (2,), generator=generator).tolist())
            return replace(sized, pixels=torch.rand(self.shape(config, sized), generator=generator))

        return {"image": image}

    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        return {"image": PlacedReader(folder, config, options.pixels, self.blank(config), self.merges_pixels)}


def _of_tokens(blank: Image, rows: int, columns: int) -> Image:
    """Returns an image of rows x columns tokens, based on one of a single token."""
    grid = (1, rows * blank.grid[1], columns * blank.grid[2])
    return replace(blank, num_tokens=rows * columns, grid=grid)


def _places(image: Media, device: torch.device) -> Tensor:
    """Coordinates (x, y) of an image's patches, row by row, int64 [patches, 2]."""
    _, height, width = image.size
    along_height, along_width = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )
    return torch.stack([along_width, along_height], dim=-1).flatten(0, 1)


class PlacedReader(ImageReader):
    """Reads images as patches. `blank` is the model's smallest image; `merges_pixels` merges the patches of a token
    into one."""

    def __init__(
        self,
        folder: Path,
        config: PretrainedConfig,
        limits: tuple[int | None, int | None],
        blank: Image,
        merges_pixels: bool,
    ):
        super().__init__(folder, config, limits)
        self.blank, self.merges_pixels = blank, merges_pixels

    def open_processor(self, folder: Path) -> Any:
        """Opens the image processor of models with an encoder. That of the unified model has the same settings, but
        needs torchvision."""
        from transformers import Gemma4ImageProcessorPil  # as in media/images.py

        return Gemma4ImageProcessorPil.from_pretrained(folder)

    def image(self, height: int, width: int, pixels: Callable[[], Tensor], source: PictureSource, where: str) -> Image:
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size  # as above

        side, patch = self.processor.pooling_kernel_size, self.processor.patch_size
        most = self.processor.max_soft_tokens * side**2
        try:
            sizes = get_aspect_ratio_preserving_size(height, width, patch, most, side)
        except ValueError as error:
            raise InputError(f"{where}: the model's image processor refuses an image ({error})") from None
        rows, columns = (size // (side * patch) for size in sizes)
        return replace(_of_tokens(self.blank, rows, columns), pixels=pixels, source=source)

    def pixels(self, picture: Any) -> Tensor:
        made = self.processor(images=[picture], return_tensors="pt")
        places = torch.as_tensor(made["image_position_ids"])[0]
        is_patch = (places >= 0).all(-1)
        patches, width = torch.as_tensor(made["pixel_values"])[0][is_patch], int(places[:, 0].max()) + 1
        if not self.merges_pixels:
            return patches
        side, patch = self.processor.pooling_kernel_size, self.processor.patch_size
        squares = patches.view(-1, side, width // side, side, patch, patch, COLOURS)
        return squares.permute(0, 2, 1, 4, 3, 5, 6).flatten(3).flatten(2).flatten(0, 1).flatten(1)


_APART = (("model.vision_tower.", "model.vision_tower."), ("model.embed_vision.", "model.embed_vision."))

GEMMA4 = Multimodal(
    encoders={
        "vision": (
            PlacedPatches(
                model_types=("gemma4_vision",),
                title="Gemma 4's encoder",
                modules=("vision_tower", "embed_vision"),
                projectors=("embed_vision",),
                tp_plan=(
                    *((f"{name}_proj.linear", COLUMNS) for name in ("q", "k", "v", "gate", "up")),
                    *((f"{name}_proj.linear", ROWS) for name in ("o", "down")),
                    *NORMS_OF_HEADS,
                ),
                bare_tables=("patch_embedder.position_embedding_table",),
                computes_in_fp32=True,
            ),
        )
    },
    file_names=(FileNames(prefixes=(*_APART, ("model.", "model.language_model."))),),
    languages=("gemma4_text",),
    left_out=("audio_config",),
    pads_media=True,
    image_text=("<|image|>", "<|image><|image|><image|>"),
)

_PROJECTED = ("patch_ln1", "patch_dense", "patch_ln2", "pos_embedding", "pos_norm")

GEMMA4_UNIFIED = replace(
    GEMMA4,
    encoders={
        "vision": (
            PlacedPatches(
                model_types=("gemma4_unified_vision",),
                title="Gemma 4's projection of patches",
                modules=("embed_vision",),
                projectors=("embed_vision.multimodal_embedder",),
                bare_tables=("embed_vision.pos_embedding",),
                computes_in_fp32=True,
                merges_pixels=True,
            ),
        )
    },
    file_names=(
        FileNames(
            prefixes=(
                *((f"model.embed_vision.{name}", f"model.vision_embedder.{name}") for name in _PROJECTED),
                ("model.embed_vision.multimodal_embedder.", "model.embed_vision."),
                ("model.", "model.language_model."),
            )
        ),
    ),
    languages=("gemma4_unified_text",),
)
