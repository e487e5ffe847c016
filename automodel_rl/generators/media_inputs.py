"""Media of prompts as inputs of the model copy: pixels, spectrograms, and positions that follow an image's grid."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch import Audio, Image, Media, Video, multimodal_positions
from automodel_rl.data.media import MediaReaders, part_type
from automodel_rl.families.known import encoder_families, multimodal_family
from automodel_rl.generator_messages import PromptMedia, Request

IN_A_PROMPT = "a prompt"
"""Source of media in error messages."""


class MediaInputs:
    """Inputs of a transformers model for the media of prompts. Without `readers` it is text-only."""

    def __init__(self, config: PretrainedConfig, readers: MediaReaders | None):
        self.config, self.readers = config, readers
        family = multimodal_family(config)
        self.rotary = None if family is None else family.rotary_grid(config)

    def of(self, requests: Sequence[Request], ids: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the media arguments for the forward of a batch of prompts.

        Args:
            ids: left-padded token ids, on the device for the pixels.
            dtype: of pixels and spectrograms.
        """
        media = [self._item(item) for request in requests for item in request.media]
        found: dict[str, Tensor] = {}
        for name, encoder in encoder_families(self.config).items():
            own = [item for item in media if item.encoder == name]
            if own:
                found |= encoder.arguments(self.config, own, ids, dtype)
        return found

    def positions(self, requests: Sequence[Request], longest: int) -> Tensor:
        """Returns the positions of left-padded prompts: int64 [B, n], or [3, B, n] for a model with M-RoPE. Pads have
        0."""
        axes = () if self.rotary is None else (3,)
        positions = torch.zeros(*axes, len(requests), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            length = len(request.prompt)
            own = torch.arange(length)
            if self.rotary is not None:
                own = multimodal_positions([self._item(item) for item in request.media], [length], self.rotary)
            positions[..., row, longest - length :] = own
        return positions

    def _item(self, item: PromptMedia) -> Media:
        assert self.readers is not None
        load = functools.partial(self.readers.load, item.kind, item.source, item.size, IN_A_PROMPT)
        if item.kind == "audio":
            (num_frames,) = item.size
            return Audio(item.start, item.num_tokens, num_frames, load, item.source)
        time, height, width = item.size
        grid = (time, height, width)
        if item.kind == "video":
            return Video(item.start, item.num_tokens, grid, load, item.source, interval=item.interval)
        return Image(item.start, item.num_tokens, grid, load, item.source)


def next_positions(positions: Tensor) -> Tensor:
    """Returns the positions after the last ones: [B, 1], or [3, B, 1], equal on all axes."""
    last = positions[..., -1:]
    return last + 1 if last.ndim == 2 else last.amax(0, keepdim=True).expand_as(last) + 1


def prompt_media(media: Sequence[Media]) -> tuple[PromptMedia, ...]:
    """Converts a prompt's media for a generator."""
    found = []
    for item in media:
        assert item.source is not None  # a `MediaReader` sets it
        interval = item.interval if isinstance(item, Video) else 1.0
        framed = isinstance(item, Image) and item.framed
        kind = part_type(item)
        found.append(PromptMedia(kind, item.start, item.num_tokens, item.size, item.source, interval, framed))
    return tuple(found)
