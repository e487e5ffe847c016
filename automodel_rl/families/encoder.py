"""The interface of a family of encoders: all that the rest of the package asks of one.

A family of encoders that takes its media in a form that is here already is an object of that form's class
(one_size_images.py, row_images.py, patch_images.py, audio.py). Another form is a class of its own.
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

from automodel_rl.batch.media import BothWays, EncoderName, Media
from automodel_rl.families.family import TPPlan
from automodel_rl.media.audio import AudioReader
from automodel_rl.media.images import ImageReader
from automodel_rl.media.videos import VideoReader

MediaReader = ImageReader | VideoReader | AudioReader
"""Reads one kind of media: a call gives an item whose file is not read yet."""


@dataclass(frozen=True)
class ReadingOptions:
    """What readers of media must know besides the checkpoint.

    Attributes:
        pixels: the fewest and the most pixels of an image, or of a video's frame; None for what the checkpoint says.
        breaks: ids of the tokens that end a row of an image, and an image, for a model whose images have rows.
    """

    pixels: tuple[int | None, int | None] = (None, None)
    breaks: tuple[int, int] | None = None


DEFAULTS = ReadingOptions()
"""What the checkpoint says, and no rows."""


@dataclass(frozen=True, kw_only=True)
class EncoderFamily(ABC):
    """One family of encoders. Names of modules are those below the model's part with the encoder.

    Attributes:
        component: the component that it is, "vision" or "audio".
        model_types: the `model_type`s that its config may have.
        title: its name in messages.
        modules: all modules of the encoder with its projectors.
        projectors: the modules that make embeddings of the language model; what comes before them is the encoder
            proper.
        tp_plan: how the encoder's linear layers split over tp, by the last two parts of their name; empty if they do
            not.
        bare_matrices: parameters [inputs, outputs] that inputs are multiplied with, and that belong to no linear layer.
        bare_tables: parameters whose rows are looked up, and that belong to no embedding.
        varlen_module: the module whose layers get bounds of segments, so that one call can compute attention for images
            or clips of different sizes; empty if there is none.
        computes_in_fp32: whether parts of it compute in fp32 whatever the dtype, so that float64 is not exact.
        breaks: the tokens that end a row of an image, and an image; None if images have no rows.
        takes_one: whether a forward takes a single item.
        reads_videos: whether it reads videos.
        has_pixel_limits: whether the image processor has limits for the pixels of an image.
    """

    component: ClassVar[EncoderName]
    breaks: ClassVar[tuple[str, str] | None] = None
    takes_one: ClassVar[bool] = False
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
        """Whether it reads videos."""
        return False

    def tp_style(self, layer: str) -> str | None:
        """How a linear layer splits over tp, by its name; None if it does not."""
        return dict(self.tp_plan).get(".".join(layer.split(".")[-2:]))

    def num_deepstack(self, config: PretrainedConfig) -> int:
        """Number of the language model's first layers after which features of an earlier encoder layer are added to
        image tokens (DeepStack, arXiv:2406.04334); 0 for most encoders.

        Args:
            config: the config of the whole model.
        """
        del config
        return 0

    def both_ways(self, config: PretrainedConfig) -> BothWays:
        """The layers of the language model in which tokens of an item see each other both ways.

        Args:
            config: the config of the whole model.
        """
        del config
        return "nowhere"

    @abstractmethod
    def encode(self, model: Any, config: PretrainedConfig, loaded: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        """Embeddings of the tokens of all items, in order.

        Args:
            model: transformers' inner model without its language model and without other encoders.
            config: the config of the whole model.
            loaded: what `Media.load` gives, on the device and in the compute dtype; of a single one if `takes_one`.
            media: the items.

        Returns:
            [m, H] in the compute dtype, or [m, (1 + D) * H] if features follow each embedding (batch/media.py).
        """

    @abstractmethod
    def blank(self, config: PretrainedConfig) -> Media:
        """The smallest item. A rank of the encoder without any encodes it to join its peers' collectives.

        Args:
            config: the config of the whole model.
        """

    @abstractmethod
    def shape(self, config: PretrainedConfig, item: Media) -> tuple[int, ...]:
        """The shape of what an item of its size loads.

        Args:
            config: the config of the whole model.
            item: the item.
        """

    def num_positions(self, config: PretrainedConfig, item: Media) -> int:
        """Number of positions that an item takes in the encoder's layers: the patches of its grid. The arguments are
        those of `shape`."""
        del config
        return math.prod(item.size)

    @abstractmethod
    def layer_output(self, layer: Any, hidden: Tensor, config: PretrainedConfig) -> Any:
        """The output of one of the encoder's layers, for the memory that a step keeps. Nothing is computed.

        Args:
            layer: the layer, on the meta device.
            hidden: its input on the meta device, [positions, width].
            config: the config of the whole model.
        """

    @abstractmethod
    def arguments(
        self, config: PretrainedConfig, media: Sequence[Media], token_ids: Tensor, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """The arguments of transformers' whole model for the items of a batch.

        Args:
            config: the config of the whole model.
            media: the items of all rows, in order.
            token_ids: int64 [B, n], on the device of the arguments.
            dtype: that of pixels and spectrograms.
        """

    @abstractmethod
    def random(self, config: PretrainedConfig, generator: torch.Generator) -> dict[str, Callable[[], Media]]:
        """What makes items of noise and of a random size, by the key of the config with the token of their kind.

        Args:
            config: the config of the whole model.
            generator: the random numbers.
        """

    @abstractmethod
    def open_readers(self, folder: Path, config: PretrainedConfig, options: ReadingOptions) -> dict[str, MediaReader]:
        """The readers of files, by the type of a message's part.

        Args:
            folder: the checkpoint's folder, with its image processor or feature extractor.
            config: the config of the whole model.
            options: limits of pixels, and tokens between rows.

        Raises:
            InputError: one of them cannot be opened.
        """
