"""Random media for random sequences, with different counts and sizes on every rank and in every microbatch."""

import dataclasses

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch import Audio, Media, TokenSequence
from automodel_rl.families.known import MULTIMODAL_FAMILIES, encoder_families
from automodel_rl.tools.verify.small_model import SPECIAL_IDS

ENDS = ("start", "end")
"""Suffixes of the config keys for the tokens around an image or clip."""

NUM_COUNTS = 3
"""Number of possible counts: a sequence has 0, 1 or 2 media items."""


def with_media(sequence: TokenSequence, config: PretrainedConfig, seed: int) -> TokenSequence:
    """Inserts up to two random images or clips into a text sequence, at random positions with text between them.

    Tokens that break the rows of an image count as text. The two items are sometimes identical, which the layout
    encodes once and the reference twice. This is skipped for encoders with rotary grids (Qwen): they rotate queries
    and keys in fp32, so a sum of gradients would round differently.

    Args:
        config: config of the whole model.
        seed: also determines the number of items.
    """
    generator = torch.Generator().manual_seed(seed)
    encoders = encoder_families(config).values()
    makers = {kind: make for encoder in encoders for kind, make in encoder.random(config, generator).items()}
    kinds = sorted(makers, key=lambda kind: kind == "video")
    has_rotary_grid = MULTIMODAL_FAMILIES[config.model_type].has_rotary_grid
    special = {name: token for name, token in config.to_dict().items() if name in SPECIAL_IDS}
    ids = sequence.input_ids.where(sequence.input_ids < min(special.values()), 0)
    mask = sequence.loss_mask
    places = torch.randperm(len(sequence), generator=generator)[: seed % NUM_COUNTS].sort().values.tolist()
    media: list[Media] = []
    added = 0
    for number, place in enumerate(places):
        kind = kinds[(seed + number) % len(kinds)]
        item: Media = dataclasses.replace(makers[kind](), source=f"{seed} {len(media)}")
        if media and seed % 2 and not has_rotary_grid:
            item = media[0].moved(-media[0].start)
        own = torch.zeros(item.num_tokens, dtype=torch.int64)
        own[torch.from_numpy(item.places)] = getattr(config, f"{kind}_token_id")
        before, after = (_around(special, (item.encoder, kind), end) for end in ENDS)
        own = torch.cat([torch.tensor(before, dtype=torch.int64), own, torch.tensor(after, dtype=torch.int64)])
        start = place + added
        added += len(own)
        ids = torch.cat([ids[:start], own, ids[start:]])
        mask = torch.cat([mask[:start], torch.zeros(len(own), dtype=torch.bool), mask[start:]])
        media.append(item.moved(start + len(before)))
    return dataclasses.replace(sequence, input_ids=ids, loss_mask=mask, media=tuple(media))


def _around(special: dict[str, int], names: tuple[str, ...], end: str) -> list[int]:
    """The token before or after an item, if the config has one under any of these names."""
    return [special[key] for name in names if (key := f"{name}_{end}_token_id") in special][:1]


def clips_of(sequence: TokenSequence) -> tuple[list[Tensor], list[int]]:
    clips = [item for item in sequence.media if isinstance(item, Audio)]
    return [clip.load() for clip in clips], [clip.num_frames for clip in clips]
