"""Videos of chats, given as frames. Their size and number determine the number of tokens; pixels are read on the rank
that encodes them."""

import copy
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image as Picture
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch.media import Media, Video
from automodel_rl.errors import InputError
from automodel_rl.media.images import ImageReader, open_picture, picture_size

SETTINGS = (
    ("video_preprocessor_config.json", None),
    ("processor_config.json", "video_processor"),
    ("preprocessor_config.json", None),
)
"""Files that may have the pixel limits of a frame, with their key there. The first match applies."""

UNLIMITED = {"shortest_edge": 1, "longest_edge": 2**62}


class Frames(NamedTuple):
    """The frames of a video.

    Attributes:
        paths: image files, in order.
        fps: frames per second.
    """

    paths: tuple[str, ...]
    fps: float


class VideoReader:
    """Reads videos in the form that a model takes.

    Every two frames form one patch in time; an odd last frame is repeated.

    Args:
        folder: the checkpoint's folder.
        config: config of the whole model.
        images: the model's image reader, whose image processor also splits frames into patches.
        pixels: minimum and maximum pixels of a frame; None for the checkpoint's limits.
    """

    def __init__(
        self, folder: Path, config: PretrainedConfig, images: ImageReader, pixels: tuple[int | None, int | None]
    ):
        self.token_id = config.video_token_id
        self.processor = copy.copy(images.processor)
        own = _limits(_settings(folder), images.processor.size)
        self.limits = [given or default for given, default in zip(pixels, own, strict=True)]
        self.of_frames = [given is not None for given in pixels]
        self.processor.size = UNLIMITED  # frames are resized here, by other rules than images
        vision = config.vision_config.to_dict()
        self.positions_per_second = vision.get("tokens_per_second") or config.to_dict().get("position_id_per_seconds")

    def __call__(self, source: Any, where: str) -> Video:
        """Returns a video whose frames are read later. They must all have the same size."""
        assert isinstance(source, Frames)  # made by `with_media_files`
        grid = self._grid(source.paths, where)
        interval = self.positions_per_second * self.processor.temporal_patch_size / source.fps
        return self._video(source.paths, grid, interval, where)

    def load(self, source: tuple[str, ...], where: str, grid: tuple[int, int, int]) -> Tensor:
        """Reads the patches of a video from its frames, patches in time one after the other, as in the model's video
        processor."""
        pair, patch = self.processor.temporal_patch_size, self.processor.patch_size
        frames = [*source, *[source[-1]] * (-len(source) % pair)]
        patches = [self._patches(open_picture(path, where), grid[1] * patch, grid[2] * patch) for path in frames]
        taken = [
            torch.stack([patches[first + place][:, :, place] for place in range(pair)], dim=2)
            for first in range(0, len(frames), pair)
        ]
        return torch.cat(taken).flatten(1)

    def token_ids(self, item: Media) -> Tensor:
        """Returns the tokens of a video, int64 [n]."""
        return torch.full((item.num_tokens,), self.token_id)

    def _video(self, paths: tuple[str, ...], grid: tuple[int, int, int], interval: float, where: str) -> Video:
        load = functools.partial(self.load, paths, where, grid)
        num_tokens = grid[0] * grid[1] * grid[2] // self.processor.merge_size**2
        return Video(0, num_tokens, grid, load, paths, interval=interval)

    def _grid(self, paths: tuple[str, ...], where: str) -> tuple[int, int, int]:
        """Returns a video's patches in time, height and width."""
        sizes = {picture_size(path, where) for path in paths}
        if len(sizes) != 1:
            raise InputError(f"{where}: frames of a video have sizes {sorted(sizes)}: use the same size for all")
        patch, factor = self.processor.patch_size, self.processor.patch_size * self.processor.merge_size
        time = -(-len(paths) // self.processor.temporal_patch_size)
        try:
            height, width = self._resized(time, *sizes.pop(), factor)
        except ValueError as error:
            raise InputError(f"{where}: the model's image processor refuses a frame ({error})") from None
        return time, height // patch, width // patch

    def _resized(self, time: int, height: int, width: int, factor: int) -> tuple[int, int]:
        """Returns the size of a video's frames, as multiples of `factor`, given their original size and the patches in
        time."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # as in images.py

        return smart_resize(height, width, factor, *self.limits)

    def _patches(self, frame: Picture.Image, height: int, width: int) -> Tensor:
        """Returns the patches of a frame, repeated for all frames of a patch in time: [n, C, pair, pixels]."""
        resized = frame.resize((width, height), Picture.Resampling(self.processor.resample))
        made = torch.as_tensor(self.processor(images=[resized], return_tensors="pt")["pixel_values"])
        patch, pair = self.processor.patch_size, self.processor.temporal_patch_size
        return made.reshape(len(made), -1, pair, patch**2)


class TimedVideoReader(VideoReader):
    """Reads videos for models that take each patch in time separately, after a timestamp: Qwen3-VL.

    The checkpoint's limits apply to the pixels of all frames together, the argument `pixels` to each frame.

    Attributes:
        brackets: ids of the tokens before and after the tokens of each patch in time.
    """

    def __init__(
        self, folder: Path, config: PretrainedConfig, images: ImageReader, pixels: tuple[int | None, int | None]
    ):
        super().__init__(folder, config, images, pixels)
        self.brackets = (config.vision_start_token_id, config.vision_end_token_id)

    def patches(self, source: Frames, where: str) -> list[tuple[float, Video]]:
        """Returns the patches in time of a video, each with its time in seconds."""
        pair = self.processor.temporal_patch_size
        _, height, width = self._grid(source.paths, where)
        found = []
        for first in range(0, len(source.paths), pair):
            paths = source.paths[first : first + pair]
            seconds = (first + min(first + pair, len(source.paths)) - 1) / 2 / source.fps
            found.append((seconds, self._video(paths, (1, height, width), 1.0, where)))
        return found

    def _resized(self, time: int, height: int, width: int, factor: int) -> tuple[int, int]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize  # as in images.py

        pair = self.processor.temporal_patch_size
        least, most = (
            limit * (time * pair if own else 1) for limit, own in zip(self.limits, self.of_frames, strict=True)
        )
        return smart_resize(time * pair, height, width, pair, factor, least, most)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns a checkpoint's video settings; {} if there are none."""
    for name, key in SETTINGS:
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text())
            if key is None or key in found:
                return found if key is None else found[key]
    return {}


def _limits(settings: dict[str, Any], default: Any) -> tuple[int, int]:
    """Returns the minimum and maximum pixels of a frame from a checkpoint's settings."""
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or default["shortest_edge"]
    most = settings.get("max_pixels") or size.get("longest_edge") or default["longest_edge"]
    return least, most
