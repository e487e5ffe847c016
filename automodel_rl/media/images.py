"""Images of chats. Their size determines their number of tokens; pixels are read on the rank that encodes them."""

import functools
import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Picture
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import Image, Media
from automodel_rl.errors import InputError

ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""EXIF's orientation tag, and the values that swap height and width."""

FILE_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG": b"IEND\xaeB`\x82", b"GIF8": b";"}
"""Final bytes of complete JPEG, PNG and GIF files, ignoring zeros, by their first bytes."""

PictureSource = str | bytes
"""An image file's path or bytes."""

ImageSource = PictureSource | Picture.Image
"""An image file's path or bytes, or an image that a dataset has opened."""


class ImageReader(ABC):
    """Reads images in the form that a model takes.

    Args:
        folder: checkpoint folder with the image processor.
        config: config of the whole model.
        limits: minimum and maximum pixels of an image, for models with variable sizes; None for the image processor's.
    """

    def __init__(self, folder: Path, config: PretrainedConfig, limits: tuple[int | None, int | None] = (None, None)):
        self.token_id = config.image_token_id
        try:
            self.processor: Any = self.open_processor(folder)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"model.path={folder}: no image processor that transformers can open ({reason})") from None
        if vars(self.processor).get("do_pan_and_scan"):
            raise InputError(
                f"model.path={folder}: the image processor splits images into several: set do_pan_and_scan to false in "
                "preprocessor_config.json"
            )
        if any(limits):
            own = tuple(self.processor.size[edge] // self.limit_factor for edge in ("shortest_edge", "longest_edge"))
            least, most = (given or default for given, default in zip(limits, own, strict=True))
            if least > most:
                raise InputError(
                    f"data: images of {least} to {most} pixels, where the image processor has {own[0]} to {own[1]}: "
                    "set both min_pixels and max_pixels"
                )
            self.processor.size = {
                "shortest_edge": least * self.limit_factor,
                "longest_edge": most * self.limit_factor,
            }

    def open_processor(self, folder: Path) -> Any:
        """Opens the model's image processor."""
        from transformers import AutoImageProcessor  # half a second, which text-only processes need not spend

        return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)

    @property
    def limit_factor(self) -> int:
        """Number of units per pixel in the image processor's limits."""
        return 1

    def __call__(self, source: ImageSource, where: str) -> Image:
        """Returns an image whose pixels are read later."""
        if isinstance(source, Picture.Image):
            source = _as_file(source)
        height, width = picture_size(source, where)
        return self.image(height, width, functools.partial(self.load, source, where), source, where)

    @abstractmethod
    def image(self, height: int, width: int, pixels: Callable[[], Tensor], source: PictureSource, where: str) -> Image:
        """Returns the `Image` for a picture of `height` x `width` pixels, which `pixels` reads. Raises InputError if
        the model's image processor refuses the size."""

    def load(self, source: PictureSource, where: str) -> Tensor:
        """Reads a picture and preprocesses it with the model's image processor."""
        return self.pixels(open_picture(source, where))

    def pixels(self, picture: Picture.Image) -> Tensor:
        """Preprocesses a picture with the model's image processor."""
        return torch.as_tensor(self.processor(images=[picture], return_tensors="pt")["pixel_values"])[0]

    def token_ids(self, item: Media) -> Tensor:
        """Returns the tokens of an image, int64 [n]."""
        return torch.full((item.num_tokens,), self.token_id)


def picture_size(source: PictureSource, where: str) -> tuple[int, int]:
    """Returns height and width of a picture as displayed, without reading its pixels."""
    try:
        with Picture.open(io.BytesIO(source) if isinstance(source, bytes) else source) as picture:
            width, height = picture.size
            return (width, height) if picture.getexif().get(ORIENTATION) in TURNED else (height, width)
    except Exception as error:  # PIL raises many kinds of errors, including one for too many pixels
        raise _unreadable(source, where, error) from None


def check_picture(source: ImageSource, where: str) -> None:
    """Raises InputError for a picture that cannot be opened, has too many pixels or is truncated. Reads the pixels only
    if the file does not end as its format requires."""
    if isinstance(source, Picture.Image):
        return
    picture_size(source, where)
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        head, size = file.read(8), file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 4096))
        end = next((end for begin, end in FILE_ENDS.items() if head.startswith(begin)), b"")
        is_whole = file.read().rstrip(b"\0").endswith(end)
    if head.startswith(b"RIFF"):  # WebP states its size
        is_whole = int.from_bytes(head[4:], "little") + 8 <= size
    if not is_whole:
        open_picture(source, where)


def open_picture(source: PictureSource, where: str) -> Picture.Image:
    """Reads a picture as displayed."""
    from transformers.image_utils import load_image  # as above

    try:
        content = Path(source).read_bytes() if isinstance(source, str) else source
        return load_image(Picture.open(io.BytesIO(content)))
    except Exception as error:  # as above
        raise _unreadable(source, where, error) from None


def _as_file(picture: Picture.Image) -> bytes:
    """Encodes a picture that a dataset has opened, as displayed."""
    from transformers.image_utils import load_image  # as above

    file = io.BytesIO()
    load_image(picture).save(file, "PNG")
    return file.getvalue()


def _unreadable(source: ImageSource, where: str, error: Exception) -> InputError:
    name = source if isinstance(source, str) else "in its bytes"
    remedy = "make it smaller" if isinstance(error, Picture.DecompressionBombError) else "use an intact image"
    return InputError(f"{where}: cannot read the image {name} ({error}): {remedy}")
