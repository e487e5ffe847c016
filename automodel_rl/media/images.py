"""Images of chats. Their size decides their number of tokens; their pixels are read on the rank that encodes them."""

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
"""EXIF's orientation tag, and the values with which a picture is shown with height and width exchanged."""

FILE_ENDS = {b"\xff\xd8": b"\xff\xd9", b"\x89PNG": b"IEND\xaeB`\x82", b"GIF8": b";"}
"""What whole files end with, zeros aside, by what they begin with: JPEG, PNG and GIF."""

PictureSource = str | bytes
"""The path of a picture's file, or the file's bytes."""

ImageSource = PictureSource | Picture.Image
"""The path of a picture's file, the file's bytes, or a picture that a dataset has opened."""


class ImageReader(ABC):
    """Reads pictures in the form that a model takes. It can be pickled, and goes with images to the ranks that encode
    them.

    Args:
        folder: the checkpoint's folder, with its image processor.
        config: the config of the whole model.
        limits: the fewest and the most pixels of an image of any size; None for what the image processor says.

    Raises:
        InputError: transformers cannot open the image processor, or the limits leave no room.
    """

    def __init__(self, folder: Path, config: PretrainedConfig, limits: tuple[int | None, int | None] = (None, None)):
        self.token_id = config.image_token_id
        try:
            self.processor: Any = self.open_processor(folder)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"model.path={folder}: no image processor that transformers opens ({reason})") from None
        if vars(self.processor).get("do_pan_and_scan"):
            raise InputError(
                f"model.path={folder}: the image processor cuts images in several: set do_pan_and_scan to false in "
                "preprocessor_config.json"
            )
        if any(limits):
            own = tuple(self.processor.size[edge] // self.limit_factor for edge in ("shortest_edge", "longest_edge"))
            least, most = (given or default for given, default in zip(limits, own, strict=True))
            if least > most:
                raise InputError(
                    f"data: images of {least} to {most} pixels, of which the image processor says {own[0]} to "
                    f"{own[1]}: give both min_pixels and max_pixels"
                )
            self.processor.size = {
                "shortest_edge": least * self.limit_factor,
                "longest_edge": most * self.limit_factor,
            }

    def open_processor(self, folder: Path) -> Any:
        """The model's image processor. The argument is that of the reader."""
        from transformers import AutoImageProcessor  # half a second of every process, of text, too

        return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)

    @property
    def limit_factor(self) -> int:
        """What a pixel of an image counts in the limits of the image processor."""
        return 1

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
        return self.image(height, width, functools.partial(self.load, source, where), source, where)

    @abstractmethod
    def image(self, height: int, width: int, pixels: Callable[[], Tensor], source: PictureSource, where: str) -> Image:
        """An image of a picture.

        Args:
            height, width: the picture's size in pixels.
            pixels: reads its pixels.
            source: the path of the picture's file, or the file's bytes.
            where: its place in the data, for error messages.

        Raises:
            InputError: the model's image processor refuses the size.
        """

    def load(self, source: PictureSource, where: str) -> Tensor:
        """The pixels of a picture, from the model's image processor.

        Args:
            source: the path of the picture's file, or the file's bytes.
            where: its place in the data, for error messages.

        Raises:
            InputError: the picture is damaged.
        """
        return self.pixels(open_picture(source, where))

    def pixels(self, picture: Picture.Image) -> Tensor:
        """The pixels that the model's image processor makes of a picture."""
        return torch.as_tensor(self.processor(images=[picture], return_tensors="pt")["pixel_values"])[0]

    def token_ids(self, item: Media) -> Tensor:
        """The tokens that stand for an image, int64 [n]."""
        return torch.full((item.num_tokens,), self.token_id)


def picture_size(source: PictureSource, where: str) -> tuple[int, int]:
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
    except Exception as error:  # PIL's formats raise errors of many kinds, and one of its own for too many pixels
        raise _unreadable(source, where, error) from None


def check_picture(source: ImageSource, where: str) -> None:
    """Raises InputError for a picture that cannot be opened, has too many pixels or is cut off. The pixels are read
    only if the file does not end as files of its format do.

    Args:
        source: the picture.
        where: its place in the data, for error messages.
    """
    if isinstance(source, Picture.Image):
        return
    picture_size(source, where)
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        head, size = file.read(8), file.seek(0, io.SEEK_END)
        file.seek(max(0, size - 4096))
        end = next((end for begin, end in FILE_ENDS.items() if head.startswith(begin)), b"")
        is_whole = file.read().rstrip(b"\0").endswith(end)
    if head.startswith(b"RIFF"):  # WebP says its size
        is_whole = int.from_bytes(head[4:], "little") + 8 <= size
    if not is_whole:
        open_picture(source, where)


def open_picture(source: PictureSource, where: str) -> Picture.Image:
    """A picture with its pixels, as it is shown. The arguments and errors are those of `picture_size`."""
    from transformers.image_utils import load_image  # as above

    try:
        content = Path(source).read_bytes() if isinstance(source, str) else source
        return load_image(Picture.open(io.BytesIO(content)))
    except Exception as error:  # as above
        raise _unreadable(source, where, error) from None


def _as_file(picture: Picture.Image) -> bytes:
    """The bytes of a file of a picture that a dataset has opened, as it is shown."""
    from transformers.image_utils import load_image  # as above

    file = io.BytesIO()
    load_image(picture).save(file, "PNG")
    return file.getvalue()


def _unreadable(source: ImageSource, where: str, error: Exception) -> InputError:
    name = source if isinstance(source, str) else "in its bytes"
    remedy = "make it smaller" if isinstance(error, Picture.DecompressionBombError) else "give an intact picture"
    return InputError(f"{where}: cannot read the image {name} ({error}): {remedy}")
