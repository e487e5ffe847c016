"""The interface of encoder families for the rest of the package.

A family whose media have an already supported form is an instance of that form's class (one_size_images.py,
row_images.py, patch_images.py, audio.py). Other forms need a new class.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import Bidirectional, EncoderName, Media
from automodel_rl.families.family import TPPlan
from automodel_rl.media.audio import AudioReader
from automodel_rl.media.images import ImageReader
from automodel_rl.media.videos import VideoReader

MediaReader = ImageReader | VideoReader | AudioReader
"""Reader of one kind of media. Calling it returns an item whose file content is read later."""


@dataclass(frozen=True)
class ReadingOptions:
    """Settings of media readers that are not in the checkpoint.

    Attributes:
        pixels: minimum and maximum pixels of an image or of a video's frame; None for the checkpoint's limits.
        breaks: ids of the tokens that end a row of an image, and an image, for models with row breaks.
    """

    pixels: tuple[int | None, int | None] = (None, None)
    breaks: tuple[int, int] | None = None


DEFAULTS = ReadingOptions()
"""The checkpoint's limits, without row breaks."""


@dataclass(frozen=True, kw_only=True)
class EncoderFamily(ABC):
    """A family of encoders. Module names are relative to the part of the model that contains the encoder. Methods take
    the `config` of the whole model.

    Attributes:
        component: "vision" or "audio".
        model_types: possible `model_type`s of its config.
        title: name in messages.
        modules: all modules of the encoder and its projectors.
        projectors: modules that compute embeddings of the language model; the rest is the encoder proper.
        tp_plan: tensor-parallel styles of the encoder's linear layers by the last two parts of their name; empty if
            unsupported.
        bare_matrices: parameters [inputs, outputs] that multiply inputs outside any linear layer.
        bare_tables: lookup tables outside any embedding.
        varlen_module: module that passes segment boundaries to its layers, so that one attention call handles images or
            clips of different sizes; empty if there is none.
        computes_in_fp32: whether parts always compute in fp32, so that float64 is not exact.
        breaks: tokens that end a row of an image, and an image; None without row breaks.
        is_unbatched: whether a forward takes a single item.
        reads_videos: whether it supports videos.
        has_pixel_limits: whether the image processor limits the pixels of an image.
    """

    component: ClassVar[EncoderName]
    breaks: ClassVar[tuple[str, str] | None] = None
    is_unbatched: ClassVar[bool] = False
    has_pixel_limits: ClassVar[bool] = False

    model_types: tuple[str, ...]
    title: str
    modules: tuple[str, ...]
    projectors: tuple[str, ...]
    tp_plan: TPPlan = ()
    bare_matrices: tuple[str, ...] = ()
    bare_tables: tuple[str, ...] = ()
    varlen_module: str = ""
    computes_in_fp32: bool = False

    @property
    def reads_videos(self) -> bool:
        return False

    def tp_style(self, layer: str) -> str | None:
        """Returns the tensor-parallel style of a linear layer; None if it is not split."""
        return dict(self.tp_plan).get(".".join(layer.split(".")[-2:]))

    def num_deepstack(self, config: PretrainedConfig) -> int:
        """Returns the number of initial language-model layers after which features of earlier encoder layers are added
        to image tokens (DeepStack, arXiv:2406.04334); usually 0."""
        del config
        return 0

    def bidirectional(self, config: PretrainedConfig) -> Bidirectional:
        """Returns the language-model layers in which the tokens of an item attend to each other in both directions."""
        del config
        return "nowhere"

    @abstractmethod
    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        """Computes the embeddings of the tokens of all items, in order.

        Args:
            model: transformers' inner model without its language model and other encoders.
            config: config of the whole model.
            loaded: results of `Media.load`, on the device and in the compute dtype; a single one if `is_unbatched`.
            media: the items.

        Returns:
            [m, H] in the compute dtype, or [m, (1 + D) * H] if features follow each embedding (batch/media.py).
        """

    @abstractmethod
    def blank(self, config: PretrainedConfig) -> Media:
        """Returns the smallest item, which encoder ranks without media encode to join the collectives of others."""

    @abstractmethod
    def shape(self, config: PretrainedConfig, item: Media) -> tuple[int, ...]:
        """Returns the shape of an item's encoder input."""

    def num_positions(self, config: PretrainedConfig, item: Media) -> int:
        """Returns the number of positions that an item takes in the encoder's layers: the patches of its grid."""
        del config
        return math.prod(item.size)

    @abstractmethod
    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        """Runs one of the encoder's layers on the meta device, for memory estimates. `hidden` is its input [positions,
        width]."""

    @abstractmethod
    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Returns the arguments of transformers' whole model for a batch with token ids [B, n], whose media are given
        in order over all rows."""

    @abstractmethod
    def random(self, config: PretrainedConfig, generator: torch.Generator) -> dict[str, Callable[[], Media]]:
        """Returns factories of random items, by the prefix of the config key with their token ("image" for
        image_token_id)."""

    @abstractmethod
    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        """Opens the media readers by message part type. `folder` has the image processor or feature extractor."""
