"""Insertion of images, videos and audio into the token sequences of chats."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from automodel_rl.batch import Audio, Media, TokenSequence, Video
from automodel_rl.data.messages import Message, media_parts
from automodel_rl.errors import InputError
from automodel_rl.families.encoder import DEFAULTS, MediaReader, ReadingOptions
from automodel_rl.families.known import encoder_families, multimodal_family
from automodel_rl.media.videos import TimedVideoReader, VideoReader


@dataclass(frozen=True)
class Insert:
    """Replacement for the placeholder token that a chat template writes for a media part.

    Attributes:
        kind: type of the part.
        ids: replacement tokens, int64 [n].
        media: media items, with positions relative to the first of these tokens.
        brackets: ids of surrounding tokens that are also replaced if present; None for none.
    """

    kind: str
    ids: Tensor
    media: tuple[Media, ...]
    brackets: tuple[int, int] | None = None

    def replaces_around(self, ids: Tensor, place: int) -> int:
        """Returns the number of tokens on each side of the placeholder that are also replaced, 0 or 1."""
        inside = 0 < place < len(ids) - 1
        return int(inside and self.brackets is not None and (int(ids[place - 1]), int(ids[place + 1])) == self.brackets)


class MediaReaders:
    """Readers for the media of chats in the form that a model takes. Picklable.

    Args:
        by_part_type: readers by part type, "image", "video" or "audio".
        encode: tokenises a text, for video timestamps; None if no chats are read.
        image_text: text that chat templates write for an image, and its replacement by the model's processor; None if
            templates write the image token.
    """

    def __init__(
        self,
        by_part_type: Mapping[str, MediaReader],
        encode: Callable[[str], list[int]] | None = None,
        image_text: tuple[str, str] | None = None,
    ):
        self.by_part_type, self.encode, self.image_text = by_part_type, encode, image_text

    def read(self, messages: Sequence[Message], where: str) -> list[Insert]:
        """Returns the tokens and media for all media parts, in order. Files, given under the key `path` of each part,
        are opened here and read later."""
        return [self._insert(part["type"], part["path"], where) for part in media_parts(messages)]

    def _insert(self, kind: str, source: Any, where: str) -> Insert:
        reader = self.by_part_type[kind]
        if isinstance(reader, TimedVideoReader):
            return self._with_seconds(reader, source, where)
        item = reader(source, where)
        return Insert(kind, reader.token_ids(item), (item,))

    def _with_seconds(self, reader: TimedVideoReader, source: Any, where: str) -> Insert:
        """Returns a video with its temporal patches separated by timestamps, as in Qwen3-VL's processor."""
        assert self.encode is not None  # set by a chat tokenizer
        start, end = reader.brackets
        ids: list[int] = []
        items: list[Media] = []
        for seconds, video in reader.patches(source, where):
            ids += [*self.encode(f"<{seconds:.1f} seconds>"), start]
            items.append(video.moved(len(ids)))
            ids += [*[reader.token_id] * video.num_tokens, end]
        return Insert("video", torch.tensor(ids), tuple(items), reader.brackets)

    def load(self, kind: str, source: Any, size: tuple[int, ...], where: str) -> Tensor:
        """Loads the encoder input from a file. `source` and `size` are those of the media item."""
        reader = self.by_part_type[kind]
        if isinstance(reader, VideoReader):
            time, height, width = size
            return reader.load(source, where, (time, height, width))
        return reader.load(source, where)

    def expand(self, sequence: TokenSequence, inserts: Sequence[Insert], where: str) -> TokenSequence:
        """Replaces the single token that the chat template wrote for each media part by all of its tokens. `inserts` is
        the result of `read`. Raises InputError if the numbers of placeholders and media differ."""
        found: dict[int, Insert] = {}
        for kind, reader in self.by_part_type.items():
            places = (sequence.input_ids == reader.token_id).nonzero()[:, 0].tolist()
            own = [insert for insert in inserts if insert.kind == kind]
            if len(places) != len(own):
                raise InputError(
                    f"{where}: the chat template writes {len(places)} {kind} tokens for {len(own)} parts of type "
                    f"{kind}: use a template that writes one for each, and remove such tokens from texts"
                )
            found |= dict(zip(places, own, strict=True))
        ids, mask = [sequence.input_ids[:0]], [sequence.loss_mask[:0]]
        media: list[Media] = []
        done = 0
        for place in sorted(found):
            insert = found[place]
            around = insert.replaces_around(sequence.input_ids, place)
            ids += [sequence.input_ids[done : place - around], insert.ids]
            mask += [sequence.loss_mask[done : place - around], torch.zeros(len(insert.ids), dtype=torch.bool)]
            start = sum(map(len, ids)) - len(insert.ids)
            media += [item.moved(start) for item in insert.media]
            done = place + 1 + around
        ids.append(sequence.input_ids[done:])
        mask.append(sequence.loss_mask[done:])
        return TokenSequence(torch.cat(ids), torch.cat(mask), media=tuple(media))


def open_readers(
    folder: Path,
    config: PretrainedConfig,
    options: ReadingOptions = DEFAULTS,
    encode: Callable[[str], list[int]] | None = None,
) -> MediaReaders | None:
    """Opens a model's media readers; None for text-only models. `folder` has the image processor or feature extractor,
    `config` is that of the whole model, and `encode` is that of `MediaReaders`."""
    family = multimodal_family(config)
    if family is None:
        return None
    readers: dict[str, MediaReader] = {}
    for encoder in encoder_families(config).values():
        readers |= encoder.open_readers(folder, config, options)
    return MediaReaders(readers, encode, family.image_text)


def part_type(item: Media) -> str:
    """Returns the message part type of a media item."""
    return "audio" if isinstance(item, Audio) else "video" if isinstance(item, Video) else "image"


def cut(sequence: TokenSequence, limit: int) -> TokenSequence:
    """Truncates a sequence to `limit` tokens, or before a media item that would otherwise be split."""
    whole = [item for item in sequence.media if item.start + item.num_tokens <= limit]
    if len(whole) < len(sequence.media):
        limit = min(limit, sequence.media[len(whole)].start)
    ids, mask = sequence.input_ids[:limit].clone(), sequence.loss_mask[:limit].clone()  # views would keep all memory
    values = {name: tensor[:limit].clone() for name, tensor in sequence.values.items()}
    return TokenSequence(ids, mask, values, media=tuple(whole))
