"""Random media for random sequences, with other numbers and sizes on every rank and in every microbatch."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch import Audio, Image, Media, TokenSequence, Video
from automodel_rl.model.audio import LEAST_TOKENS, num_audio_tokens, num_frames_of, spectrogram_shape
from automodel_rl.model.vision import blank_image
from automodel_rl.support.description import ImageForm, image_form
from automodel_rl.support.encoders import MULTIMODAL_FAMILIES
from automodel_rl.tools.verify.small_model import SPECIAL_IDS

ENDS = ("start", "end")
"""The tokens around an image or a clip, in the keys of configs."""

NUM_COUNTS = 3
"""Number of different counts: a sequence has 0, 1 or 2 images or clips."""


def with_media(sequence: TokenSequence, config: PretrainedConfig, seed: int) -> TokenSequence:
    """Adds none, one or two random images or clips to a sequence, at random places with text between them.

    Tokens that break the rows of an image are text. Sometimes both are the same, which a layout encodes once and the
    reference twice. Not for Qwen's encoders of images: they turn queries and keys in fp32, so that a sum of gradients
    is rounded otherwise.

    Args:
        sequence: a sequence of text.
        config: the whole model's config.
        seed: the random seed, which also decides the number of images or clips.
    """
    generator = torch.Generator().manual_seed(seed)
    family = MULTIMODAL_FAMILIES[config.model_type]
    kinds = [*family.encoders, *(["video"] if family.videos else [])]
    special = {name: token for name, token in config.to_dict().items() if name in SPECIAL_IDS}
    ids = sequence.input_ids.where(sequence.input_ids < min(special.values()), 0)
    mask = sequence.loss_mask
    places = torch.randperm(len(sequence), generator=generator)[: seed % NUM_COUNTS].sort().values.tolist()
    media: list[Media] = []
    added = 0
    for number, place in enumerate(places):
        kind = kinds[(seed + number) % len(kinds)]
        item: Media = dataclasses.replace(RANDOM[kind](config, generator), source=f"{seed} {len(media)}")
        if media and seed % 2 and not family.has_rotary_grid:
            item = media[0].moved(-media[0].start)
        own = torch.zeros(item.num_tokens, dtype=torch.int64)
        own[torch.from_numpy(item.places)] = _token_id(config, kind)
        names = [f"{item.encoder}_{end}_token_id" for end in ENDS]
        before, after = ([special[name]] if name in special else [] for name in names)
        own = torch.cat([torch.tensor(before, dtype=torch.int64), own, torch.tensor(after, dtype=torch.int64)])
        start = place + added
        added += len(own)
        ids = torch.cat([ids[:start], own, ids[start:]])
        mask = torch.cat([mask[:start], torch.zeros(len(own), dtype=torch.bool), mask[start:]])
        media.append(item.moved(start + len(before)))
    return dataclasses.replace(sequence, input_ids=ids, loss_mask=mask, media=tuple(media))


def _token_id(config: PretrainedConfig, kind: str) -> int:
    ids = {"vision": "image_token_id", "video": "video_token_id", "audio": "audio_token_id"}
    return getattr(config, ids[kind])


def random_image(config: PretrainedConfig, generator: torch.Generator) -> Image:
    """An image of noise, of a random size if the model takes images of any size."""
    blank = blank_image(config)
    form = image_form(config)
    if form is ImageForm.ONE_SIZE:
        return dataclasses.replace(blank, pixels=torch.randn(blank.load().shape, generator=generator))
    merge, channels = blank.grid[1], blank.load().shape[1]
    height, width = torch.randint(1, 4, (2,), generator=generator).tolist()
    grid = (1, height * merge, width * merge)
    if form is ImageForm.ANY_SIZE:
        colours, side, _ = blank.load().shape
        width += 1  # plain transformers fails on an image of one token
        grid = (1, height * merge, width * merge)
        pixels = torch.randn(colours, height * side, width * side, generator=generator)
        return Image(0, height * (width + 1), grid, pixels, row=width)
    pixels = torch.randn(height * width * merge**2, channels, generator=generator)
    return Image(0, height * width, grid, pixels)


def random_video(config: PretrainedConfig, generator: torch.Generator) -> Video:
    """A video of noise, of two or three patches in time; of one where they stand apart."""
    image = random_image(config, generator)
    is_grid = MULTIMODAL_FAMILIES[config.model_type].videos == "grid"
    time = int(torch.randint(2, 4, (1,), generator=generator)) if is_grid else 1
    interval = float(torch.rand(1, generator=generator) * 3)
    pixels = torch.randn(time * image.load().shape[0], image.load().shape[1], generator=generator)
    return Video(0, time * image.num_tokens, (time, *image.grid[1:]), pixels, interval=interval)


def random_clip(config: PretrainedConfig, generator: torch.Generator) -> Audio:
    """A clip of noise and of a random length, with other noise in the place of the silence that fills it up."""
    shortest = num_frames_of(LEAST_TOKENS)
    longest = min(shortest + 12, spectrogram_shape(config, shortest + 12)[1])
    num_frames = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
    features = torch.randn(spectrogram_shape(config, num_frames), generator=generator)
    return Audio(0, num_audio_tokens(num_frames), num_frames, features)


RANDOM: dict[str, Callable[[PretrainedConfig, torch.Generator], Media]] = {
    "vision": random_image,
    "video": random_video,
    "audio": random_clip,
}
"""What makes a random item of each kind."""


def clips_of(sequence: TokenSequence) -> tuple[list[Tensor], list[int]]:
    """The spectrograms of a sequence's clips, and the frames of each."""
    clips = [item for item in sequence.media if isinstance(item, Audio)]
    return [clip.load() for clip in clips], [clip.num_frames for clip in clips]
