"""Images of chats. Their size decides their number of tokens; their pixels are read on the rank that encodes them."""

import dataclasses
import functools
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Picture
from torch import Tensor
from transformers import AutoImageProcessor, PretrainedConfig
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from automodel_rl.batch import Image
from automodel_rl.errors import InputError
from automodel_rl.model.vision import blank_image, token_patches
from automodel_rl.support.description import ImageForm, image_form
from automodel_rl.support.encoders import MULTIMODAL_FAMILIES

ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""EXIF's orientation tag, and the values with which a picture is shown with height and width exchanged."""

ImageSource = str | bytes | Picture.Image
"""The path of a picture's file, the file's bytes, or a picture that a dataset has opened."""


class ImageReader:
    """Reads images in the form that a model takes. It can be pickled, and goes with images to the ranks that encode
    them.

    Args:
        folder: the checkpoint's folder, with its image processor.
        config: the config of the whole model.
        pixels: the fewest and the most pixels of an image of any size; None for what the image processor says.
        breaks: ids of the tokens that end a row of an image, and an image, for a model whose images have rows.

    Raises:
        InputError: transformers cannot open the image processor, or the limits leave no room.
    """

    def __init__(
        self,
        folder: Path,
        config: PretrainedConfig,
        pixels: tuple[int | None, int | None] = (None, None),
        breaks: tuple[int, int] | None = None,
    ):
        self.blank, self.token_id = blank_image(config), config.image_token_id
        self.text = MULTIMODAL_FAMILIES[config.model_type].image_text
        self.form, self.breaks = image_form(config), breaks
        self.merge, self.side = token_patches(config), token_patches(config) * config.vision_config.patch_size
        try:
            self.processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"model.path={folder}: no image processor that transformers opens ({reason})") from None
        if vars(self.processor).get("do_pan_and_scan"):
            raise InputError(
                f"model.path={folder}: the image processor cuts images in several: set do_pan_and_scan to false in "
                "preprocessor_config.json"
            )
        if any(pixels):
            own = (self.processor.size["shortest_edge"], self.processor.size["longest_edge"])
            least, most = (given or default for given, default in zip(pixels, own, strict=True))
            if least > most:
                raise InputError(
                    f"data: images of {least} to {most} pixels, of which the image processor says {own[0]} to "
                    f"{own[1]}: give both min_pixels and max_pixels"
                )
            self.processor.size = {"shortest_edge": least, "longest_edge": most}

    def __call__(self, source: ImageSource, where: str) -> Image:
        """An image whose pixels are not read yet.

        Args:
            source: the picture.
            where: its place in the data, for error messages.

        Raises:
            InputError: the picture cannot be opened, or the model's image processor refuses its size.
        """
        if isinstance(source, Picture.Image):
            source = _as_file(source)
        height, width = picture_size(source, where)
        pixels = functools.partial(self.load, source, where)
        if self.form is ImageForm.ONE_SIZE:
            return dataclasses.replace(self.blank, pixels=pixels, source=source)
        if self.form is ImageForm.ANY_SIZE:
            return self._with_rows(height, width, pixels, source)
        patch, merge, limits = self.processor.patch_size, self.processor.merge_size, self.processor.size
        try:
            height, width = smart_resize(height, width, patch * merge, limits["shortest_edge"], limits["longest_edge"])
        except ValueError as error:
            raise InputError(f"{where}: the model's image processor refuses an image ({error})") from None
        grid = (1, height // patch, width // patch)
        return Image(0, grid[1] * grid[2] // merge**2, grid, pixels, source)

    def _with_rows(self, height: int, width: int, pixels: Callable[[], Tensor], source: str | bytes) -> Image:
        """An image of which each row of tokens ends with a break. Larger ones are made smaller, as by Pixtral's image
        processor, and what is left is a whole number of tokens."""
        longest = self.processor.size["longest_edge"]
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((size - 1) // self.side + 1 for size in (height, width))
        return Image(0, rows * (columns + 1), (1, rows * self.merge, columns * self.merge), pixels, source, row=columns)

    def load(self, source: str | bytes, where: str) -> Tensor:
        """The pixels of a picture, from the model's image processor.

        Args:
            source: the path of the picture's file, or the file's bytes.
            where: its place in the data, for error messages.

        Raises:
            InputError: the picture is damaged.
        """
        picture = open_picture(source, where)
        options = {"patch_size": self.side} if self.form is ImageForm.ANY_SIZE else {}
        found = torch.as_tensor(self.processor(images=[picture], return_tensors="pt", **options)["pixel_values"])
        return found if self.form is ImageForm.PATCHES else found[0]

    def write_breaks(self, ids: Tensor, image: Image) -> None:
        """Writes the tokens that break the rows of an image, in place.

        Args:
            ids: token ids of the image's sequence, with image tokens only in the image's place.
            image: the image.
        """
        if image.row:
            assert self.breaks is not None  # a chat tokenizer has found them
            last = image.start + image.num_tokens - 1
            ids[image.start + image.row : last : image.row + 1], ids[last] = self.breaks


def picture_size(source: str | bytes, where: str) -> tuple[int, int]:
    """Height and width of a picture as it is shown. The pixels are not read.

    Args:
        source: the path of the picture's file, or the file's bytes.
        where: its place in the data, for error messages.

    Raises:
        InputError: the picture cannot be opened.
    """
    try:
        with Picture.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
            width, height = picture.size
            return (width, height) if picture.getexif().get(ORIENTATION) in TURNED else (height, width)
    except (OSError, ValueError) as error:
        raise _unreadable(source, where, error) from None


def open_picture(source: str | bytes, where: str) -> Picture.Image:
    """A picture with its pixels, as it is shown. The arguments and errors are those of `picture_size`."""
    try:
        content = Path(source).read_bytes() if isinstance(source, str) else source
        return load_image(Picture.open(io.BytesIO(content)))
    except (OSError, ValueError) as error:
        raise _unreadable(source, where, error) from None


def _as_file(picture: Picture.Image) -> bytes:
    """The bytes of a file of a picture that a dataset has opened, as it is shown."""
    file = io.BytesIO()
    load_image(picture).save(file, "PNG")
    return file.getvalue()


def _unreadable(source: ImageSource, where: str, error: Exception) -> InputError:
    name = source if isinstance(source, str) else "in its bytes"
    return InputError(f"{where}: cannot read the image {name} ({error}): give an intact picture")
