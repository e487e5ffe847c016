"""Images, videos and audio of chats, put into the token sequences that a chat template has written."""

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
    """What takes the place of the token that a chat template writes for a part of a message.

    Attributes:
        kind: the type of the part.
        ids: the tokens, int64 [n].
        media: their media, with places that count from the first of these tokens.
        brackets: ids of the tokens before and after that are replaced as well, if they are there; None for none.
    """

    kind: str
    ids: Tensor
    media: tuple[Media, ...]
    brackets: tuple[int, int] | None = None

    def replaces_around(self, ids: Tensor, place: int) -> int:
        """Number of tokens on either side of a template's token that are replaced as well, 0 or 1."""
        inside = 0 < place < len(ids) - 1
        return int(inside and self.brackets is not None and (int(ids[place - 1]), int(ids[place + 1])) == self.brackets)


class MediaReaders:
    """Reads the media of chats, each kind in the form that a model takes. It can be pickled.

    Args:
        of_parts: the readers by the type of a message's part, "image", "video" or "audio".
        encode: gives the tokens of a text, for videos whose seconds are written; None where no chat is read.
        image_text: what chat templates write for an image, and what the model's processor puts in its place; None if
            templates write the image token.
    """

    def __init__(
        self,
        of_parts: Mapping[str, MediaReader],
        encode: Callable[[str], list[int]] | None = None,
        image_text: tuple[str, str] | None = None,
    ):
        self.of_parts, self.encode, self.image_text = of_parts, encode, image_text

    def read(self, messages: Sequence[Message], where: str) -> list[Insert]:
        """The tokens and media of messages' parts, in order. Contents of files are not read yet.

        Args:
            messages: the messages, in which parts have their file under the key `path`.
            where: the chat's place in the data, for error messages.

        Raises:
            InputError: a file cannot be opened, or does not fit the model.
        """
        return [self._insert(part["type"], part["path"], where) for part in media_parts(messages)]

    def _insert(self, kind: str, source: Any, where: str) -> Insert:
        reader = self.of_parts[kind]
        if isinstance(reader, TimedVideoReader):
            return self._with_seconds(reader, source, where)
        item = reader(source, where)
        return Insert(kind, reader.token_ids(item), (item,))

    def _with_seconds(self, reader: TimedVideoReader, source: Any, where: str) -> Insert:
        """A video whose patches in time stand apart, each after its seconds, as Qwen3-VL's processor writes them."""
        assert self.encode is not None  # a chat tokenizer has given it
        start, end = reader.brackets
        ids: list[int] = []
        items: list[Media] = []
        for seconds, video in reader.patches(source, where):
            ids += [*self.encode(f"<{seconds:.1f} seconds>"), start]
            items.append(video.moved(len(ids)))
            ids += [*[reader.token_id] * video.num_tokens, end]
        return Insert("video", torch.tensor(ids), tuple(items), reader.brackets)

    def load(self, kind: str, source: Any, size: tuple[int, ...], where: str) -> Tensor:
        """What an encoder takes of a file.

        Args:
            kind: the type of a message's part.
            source, size: those of the item.
            where: its place in the data, for error messages.

        Raises:
            InputError: the file is damaged.
        """
        reader = self.of_parts[kind]
        if isinstance(reader, VideoReader):
            time, height, width = size
            return reader.load(source, where, (time, height, width))
        return reader.load(source, where)

    def expand(self, sequence: TokenSequence, inserts: Sequence[Insert], where: str) -> TokenSequence:
        """A sequence in which each image, video and clip has all of its tokens. The chat template writes only one for
        each.

        Args:
            sequence: the tokens that the chat template wrote.
            inserts: what `read` gave; those of one kind in order.
            where: the chat's place in the data, for error messages.

        Raises:
            InputError: the sequence has more or fewer tokens of a kind than there are media.
        """
        found: dict[int, Insert] = {}
        for kind, reader in self.of_parts.items():
            places = (sequence.input_ids == reader.token_id).nonzero()[:, 0].tolist()
            own = [insert for insert in inserts if insert.kind == kind]
            if len(places) != len(own):
                raise InputError(
                    f"{where}: the chat template writes {len(places)} {kind} tokens for {len(own)} parts of type "
                    f"{kind}: use a template that writes one for each, and no such token in texts"
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
    """The readers of a model's media; None for a model that reads text only.

    Args:
        folder: the checkpoint's folder, with its image processor or feature extractor.
        config: the config of the whole model.
        options: limits of pixels, and tokens between rows.
        encode: as of `MediaReaders`.

    Raises:
        InputError: one of them cannot be opened.
    """
    family = multimodal_family(config)
    if family is None:
        return None
    readers: dict[str, MediaReader] = {}
    for encoder in encoder_families(config).values():
        readers |= encoder.open_readers(folder, config, options)
    return MediaReaders(readers, encode, family.image_text)


def part_type(item: Media) -> str:
    """The type of a message's part that stands for an item."""
    return "audio" if isinstance(item, Audio) else "video" if isinstance(item, Video) else "image"


def cut(sequence: TokenSequence, limit: int) -> TokenSequence:
    """The first `limit` tokens of a sequence, or fewer if an image or clip would be cut in two: then the sequence ends
    before it."""
    whole = [item for item in sequence.media if item.start + item.num_tokens <= limit]
    if len(whole) < len(sequence.media):
        limit = min(limit, sequence.media[len(whole)].start)
    ids, mask = sequence.input_ids[:limit].clone(), sequence.loss_mask[:limit].clone()  # views would keep the rest
    values = {name: tensor[:limit].clone() for name, tensor in sequence.values.items()}
    return TokenSequence(ids, mask, values, media=tuple(whole))
