"""Tokenisation of chats, with a mask of the assistant's tokens."""

import copy
import functools
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence
from automodel_rl.config import RunConfig
from automodel_rl.data.checks import holds_chats
from automodel_rl.data.kinds import is_empty_message
from automodel_rl.data.media import MediaReaders, open_readers
from automodel_rl.data.messages import Chat
from automodel_rl.data.rendering_limits import check_length, rendering_limits
from automodel_rl.data.template import ChatTemplate, named_templates
from automodel_rl.data.turns import MARKS_REMEDY, Span, TokenOffsets, find_turns
from automodel_rl.errors import InputError
from automodel_rl.families.encoder import ReadingOptions
from automodel_rl.families.known import encoder_families
from automodel_rl.hf.opened_model import OpenedModel


def open_chat_tokenizer(config: RunConfig, model: OpenedModel) -> "ChatTokenizer":
    """Opens the chat tokenizer of a run. Raises InputError if the data contain chats and there is no chat template."""
    folder = model.files.tokenizer_folder
    if not model.files.has_tokenizer:
        raise InputError(
            f"model.path={folder}: has no tokenizer files, such as tokenizer.json: copy those of the model"
        )
    tokenizer = model.tokenizer(config.data.chat_template)
    if tokenizer.chat_template is None and holds_chats(config):
        raise InputError(f"model.path={folder}: the tokenizer has no chat template: set one in data.chat_template")
    breaks = _breaks(tokenizer, model.whole, folder)
    options = ReadingOptions((config.data.min_pixels, config.data.max_pixels), breaks)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    media = open_readers(model.files.folder, model.whole, options, encode)
    return ChatTokenizer(tokenizer, config.trained_turns, media, config.data.chat_template_kwargs)


def _breaks(tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig, folder: Path) -> tuple[int, int] | None:
    """Returns the ids of the tokens that end a row of an image, and an image, for models that mark rows."""
    breaks = next((encoder.breaks for encoder in encoder_families(model).values() if encoder.breaks), None)
    if breaks is None:
        return None
    known = tokenizer.get_vocab()
    if not known.keys() >= {*breaks}:
        raise InputError(
            f"model.path={folder}: the tokenizer has no {' or '.join(breaks)}, which end the rows of images: use the "
            "tokenizer that belongs to the model"
        )
    return known[breaks[0]], known[breaks[1]]


def check_chats(config: RunConfig, model: OpenedModel, chats: Iterable[tuple[Chat, str]]) -> list[str]:
    """Raises InputError if the chat template cannot render one of the chats, or the result cannot be trained on; with
    `on_bad_record: drop`, only warns. `chats` have their locations.

    Returns:
        Warnings about skipped records and turns without an end token.
    """
    with rendering_limits(f"model.path={config.model.path}"):
        tokenizer = open_chat_tokenizer(config, model)
    writes_prompts = config.record_type == "prompts"
    warnings: list[str] = []
    refused: list[str] = []
    for chat, where in chats:
        try:
            sequence = _written(tokenizer, chat, where, writes_prompts)
        except InputError as error:
            if config.data.on_bad_record == "stop":
                raise
            refused.append(f"{error}: such records are dropped (data.on_bad_record=drop)")
            continue
        if not writes_prompts and not warnings and not tokenizer.ends_turns(sequence):
            warnings.append(
                f"{where}: no trained turn ends with a special token, so the model does not learn to stop: put the end "
                "token between the template's {% generation %} and {% endgeneration %}, or set data.chat_template to a "
                "template that ends turns with one"
            )
    return refused + warnings


def _written(tokenizer: "ChatTokenizer", chat: Chat, where: str, as_prompt: bool) -> TokenSequence:
    """Renders a chat within limits, then tokenises it."""
    with rendering_limits(where):
        text = tokenizer.template.text(chat)
        if text is None:
            tokenizer.template.encode(chat, where)  # raises with the reason
        check_length(text, where)
    return tokenizer.generation_prompt(chat, where) if as_prompt else tokenizer(chat, where)


class ChatTokenizer:
    """Turns chats into a `TokenSequence` whose loss mask covers the assistant's tokens.

    The mask follows the template's generation marks if it has them. Most published templates have none; turns are then
    located by changing one at a time. Turns that cannot be located, and content that the template drops, are errors.

    Args:
        tokenizer: a tokenizer with a chat template.
        train_on: "all" or "last": the mask covers all trained turns of a chat, or only its last turn.
        media: readers of images, videos and audio; None for text-only models.
        variables: additional variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        train_on: str,
        media: MediaReaders | None = None,
        variables: Mapping[str, Any] | None = None,
    ):
        self.tokenizer, self.train_on, self.media = tokenizer, train_on, media
        self.template = ChatTemplate(tokenizer, () if media is None else tuple(media.by_part_type), variables)
        if media is not None and media.image_text is not None:
            self.template = _with_image_text(self.template, *media.image_text)

    def __call__(self, chat: Chat, where: str) -> TokenSequence:
        """Tokenises a chat.

        Raises:
            InputError: the template refuses the chat or drops part of it, or the assistant's tokens cannot be located.
        """
        marked: list[Span] = []
        if has_marks := self.template.has_marks(chat):
            ids, marked = self._all_marked(chat, where)
        else:
            ids = self.template.encode(chat, where)["input_ids"]
        self.template.check(chat, where)
        turns = self._turns(chat, where)
        if has_marks:
            spans = self._marked(chat, turns, marked, where)
        else:
            found = find_turns(self.template, chat, ids, turns, where)
            ids, spans = found.ids, found.spans
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in spans:
            mask[start:end] = True
        return self._with_media(TokenSequence(torch.tensor(ids), mask), chat, where)

    def text_sequence(self, text: str) -> TokenSequence:
        """Tokenises a plain text, with all tokens trained. Adds the end token and the tokenizer's special tokens around
        texts, unless the text already has them."""
        end = self.tokenizer.eos_token_id
        if end is not None and text.rstrip().endswith(str(self.tokenizer.eos_token)):
            text, end = text.rstrip(), None
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        before, after = self._around_texts
        before = before if ids[: len(before)] != before else []
        after = after if after and ids[-len(after) :] != after else []
        ids = [*before, *ids, *after]
        if end is not None and (not ids or ids[-1] != end):
            ids = [*ids, end]
        return TokenSequence(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool))

    @functools.cached_property
    def _around_texts(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer adds before and after texts."""
        plain, whole = (self.tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True))
        place = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[:place], whole[place + len(plain) :]

    def ends_turns(self, sequence: TokenSequence) -> bool:
        """Whether any trained span ends with a special token, ignoring trailing white space."""
        mask = [*sequence.loss_mask.tolist(), False]
        ids = sequence.input_ids.tolist()
        special = {*self.tokenizer.convert_tokens_to_ids([*self.template.special_tokens])}
        for last in (at for at in range(len(ids)) if mask[at] and not mask[at + 1]):
            while mask[last] and last > 0 and not self.tokenizer.decode([ids[last]]).strip():
                last -= 1
            if ids[last] in special:
                return True
        return False

    def prompt_sequence(self, chat: Chat, where: str) -> TokenSequence:
        """Returns the tokens before the assistant's last turn, with its header; empty if the chat begins with that
        turn."""
        before = chat.until(chat.turns[-1])
        if before.messages:
            return self.generation_prompt(before, where)
        return TokenSequence(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))

    def generation_prompt(self, chat: Chat, where: str) -> TokenSequence:
        """Returns the tokens of a chat with the header of the assistant's next turn. None are trained."""
        ids = self.template.encode(chat, where, add_generation_prompt=True)["input_ids"]
        self.template.check(chat, where, add_generation_prompt=True)
        sequence = TokenSequence(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.bool))
        return self._with_media(sequence, chat, where)

    def _with_media(self, sequence: TokenSequence, chat: Chat, where: str) -> TokenSequence:
        if self.media is None:
            return sequence
        return self.media.expand(sequence, self.media.read(chat.messages, where), where)

    def _turns(self, chat: Chat, where: str) -> list[int]:
        """Returns the message indices of the turns that the mask covers."""
        turns = [turn for turn in chat.trained if self.train_on == "all" or turn == chat.turns[-1]]
        for turn in turns:
            if is_empty_message(chat.messages[turn]):
                raise InputError(
                    f"{where}: turn {turn} of the assistant is empty: add a text, or weight: 0 so that it is not "
                    "trained, or remove the record"
                )
        if not turns:
            raise InputError(
                f"{where}: the last turn of the assistant has weight 0, but data.train_on=last trains no other: use "
                "all, or remove the record"
            )
        return turns

    def _marked(self, chat: Chat, turns: list[int], spans: list[Span], where: str) -> list[Span]:
        """Selects the spans of the given turns from all spans that the template marks."""
        if not spans:
            raise InputError(f"{where}: the chat template marks no token as the assistant's: {MARKS_REMEDY}")
        if len(turns) == len(chat.turns) == len(spans):
            return spans
        found: list[Span] = []
        counted = 0
        for turn in turns:
            # A turn may have no span or several. The template may render a turn differently once later turns follow.
            begin, end = (self._num_spans(chat.until(place), where) for place in (turn, turn + 1))
            if not counted <= begin < end <= len(spans):
                raise InputError(
                    f"{where}: the chat template marks no token of turn {turn} as the assistant's: {MARKS_REMEDY}"
                )
            found += spans[begin:end]
            counted = end
        return found

    def _num_spans(self, chat: Chat, where: str) -> int:
        if not chat.messages:
            return 0
        return len(self._all_marked(chat, where)[1])

    def _all_marked(self, chat: Chat, where: str) -> tuple[list[int], list[Span]]:
        """Returns a chat's token ids and the spans that the template marks as the assistant's. transformers' own mask
        extends to the end of the chat if a span ends outside any token or with the first token."""
        text, marked = self.template.marked_text(chat, where)
        with self.template.refusals(where):
            places = TokenOffsets(self.tokenizer, text)
        mask = [0] * len(places.ids)
        for start, end in marked:
            tokens = places.of(start, end) if start < end else (0, 0)
            if tokens is None:
                raise InputError(
                    f"{where}: the tokens that the chat template marks as the assistant's cannot be determined: use a "
                    "fast tokenizer"
                )
            mask[slice(*tokens)] = [1] * (tokens[1] - tokens[0])
        return places.ids, _spans(mask)


ONE_IMAGE = Chat([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}])


def _with_image_text(template: ChatTemplate, written: str, wanted: str) -> ChatTemplate:
    """Returns a template with the text `written` for an image replaced by `wanted`, as in the model's processor, or the
    template itself if its output does not change; images are then refused.

    The template is changed rather than its output because the assistant's marks are character offsets.
    """
    tokenizer = copy.copy(template.tokenizer)
    named = named_templates(tokenizer)
    tokenizer.chat_template = {name: text.replace(written, wanted) for name, text in named.items()}
    changed = ChatTemplate(tokenizer, template.reads, template.variables)
    return changed if wanted in (changed.text(ONE_IMAGE) or "") else template


def _spans(mask: list[int]) -> list[Span]:
    """Returns the spans where a mask is set."""
    edges = [i for i, (before, after) in enumerate(itertools.pairwise([0, *mask, 0])) if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))
