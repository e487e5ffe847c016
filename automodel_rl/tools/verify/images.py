"""Random images for random sequences, with other numbers and sizes on every rank and in every microbatch."""

import dataclasses

import torch
from transformers import PretrainedConfig

from automodel_rl.batch import Image, TokenSequence
from automodel_rl.model.vision import blank_image
from automodel_rl.support.description import ImageForm, image_form
from automodel_rl.support.families import VISION_FAMILIES

NUM_COUNTS = 3
"""Number of different image counts: a sequence has 0, 1 or 2 images."""


def with_images(sequence: TokenSequence, config: PretrainedConfig, seed: int) -> TokenSequence:
    """Adds none, one or two random images to a sequence, at random places with text between them.

    Tokens that break the rows of an image are text. Sometimes both are the same image, which a layout encodes once and
    the reference twice. Not for Qwen's encoders: they turn queries and keys in fp32, so that a sum of gradients is
    rounded otherwise.

    Args:
        sequence: a sequence of text.
        config: the whole model's config.
        seed: the random seed, which also decides the number of images.
    """
    generator = torch.Generator().manual_seed(seed)
    # Image tokens, and video tokens, have a meaning; the video's id is next to the image's in both configs.
    ids = sequence.input_ids.where(sequence.input_ids < config.image_token_id - 1, 0)
    mask = sequence.loss_mask
    places = torch.randperm(len(sequence), generator=generator)[: seed % NUM_COUNTS].sort().values.tolist()
    images: list[Image] = []
    for place in places:
        image = dataclasses.replace(random_image(config, generator), source=f"{seed} {len(images)}")
        if images and seed % 2 and not VISION_FAMILIES[config.model_type].has_rotary_grid:
            image = images[0].moved(-images[0].start)
        start = place + sum(before.num_tokens for before in images)
        tokens = torch.zeros(image.num_tokens, dtype=torch.int64)
        tokens[torch.from_numpy(image.places)] = config.image_token_id
        ids = torch.cat([ids[:start], tokens, ids[start:]])
        mask = torch.cat([mask[:start], torch.zeros(image.num_tokens, dtype=torch.bool), mask[start:]])
        images.append(image.moved(start))
    return dataclasses.replace(sequence, input_ids=ids, loss_mask=mask, images=tuple(images))


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
