"""Chats to token sequences: the chat template's tokens, and which of them the assistant wrote."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence
from automodel_rl.config import GRPOConfig, RunConfig, SFTConfig
from automodel_rl.config.data import SourcesConfig
from automodel_rl.data.images import ImageReader, image_parts
from automodel_rl.data.messages import Chat
from automodel_rl.data.template import ChatTemplate
from automodel_rl.errors import InputError
from automodel_rl.hf.read import read_config, resolve_checkpoint
from automodel_rl.support.description import language_config
from automodel_rl.support.families import VISION_FAMILIES

OF_PROCESSOR = "chat_template.json"
"""Where transformers 4 put the chat template of a model with images."""

Span = tuple[int, int]
"""First token of an assistant turn, and the one after its last."""

MARKS_REMEDY = (
    "give data.chat_template a template that puts assistant turns between {% generation %} and {% endgeneration %}"
)


def load_tokenizer(
    folder: Path, data: SourcesConfig, vocab_size: int, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with the user's chat template if there is one.

    Args:
        folder: of the checkpoint.
        data: with the user's chat template.
        vocab_size: of the model.
        trust_remote_code: run the code that the checkpoint brings for it.
    """
    template = data.chat_template
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"model.path={folder}: no tokenizer that transformers opens ({reason})") from None
    if len(tokenizer) > vocab_size:
        raise InputError(
            f"model.path={folder}: the tokenizer has {len(tokenizer)} tokens but the model's vocabulary is "
            f"{vocab_size}: use the tokenizer that belongs to the model"
        )
    if template is not None:
        try:
            tokenizer.chat_template = Path(template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"data.chat_template={template}: cannot read it ({error})") from None
    elif tokenizer.chat_template is None and (folder / OF_PROCESSOR).is_file():
        tokenizer.chat_template = json.loads((folder / OF_PROCESSOR).read_text())["chat_template"]
    if tokenizer.chat_template is None:
        raise InputError(f"model.path={folder}: the tokenizer has no chat template: give one in data.chat_template")
    return tokenizer


def open_chat_tokenizer(config: RunConfig) -> "ChatTokenizer":
    """Of a config's checkpoint, whose weights are not needed."""
    folder = resolve_checkpoint(config.model.path, with_weights=False)
    model = read_config(folder)
    tokenizer = load_tokenizer(folder, config.data, language_config(model).vocab_size, config.model.trust_remote_code)
    images = ImageReader(folder, model) if model.model_type in VISION_FAMILIES else None
    return ChatTokenizer(tokenizer, config.data.train_on if isinstance(config, SFTConfig) else "all", images)


def check_chats(config: RunConfig, chats: Iterable[tuple[Chat, str]]) -> None:
    """Raises InputError if the chat template cannot write one of some chats, or not so that it can be trained on.

    Args:
        config: of a run.
        chats: of its data, and where each is.
    """
    tokenizer = open_chat_tokenizer(config)
    write: Callable[[Chat, str], Any] = tokenizer.opening if isinstance(config, GRPOConfig) else tokenizer
    for chat, where in chats:
        write(chat, where)


class ChatTokenizer:
    """Turns chats into a `TokenSequence` whose loss mask covers the assistant's tokens.

    Where the template marks the assistant's part, the marks decide. Most published templates have no marks; then the
    chat is tokenised up to the start and up to the end of each assistant turn, which works when both are prefixes of
    the whole chat's tokens, and is an error when they are not. What the template leaves out of a chat is an error, too.

    Args:
        tokenizer: with a chat template.
        train_on: "all" assistant turns that a chat says are trained, or of these only the "last" of the chat.
        images: reads them, for a model with an encoder.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str, images: ImageReader | None = None):
        self.tokenizer, self.train_on, self.images = tokenizer, train_on, images
        self.template = ChatTemplate(tokenizer, sees_images=images is not None)

    def __call__(self, chat: Chat, where: str) -> TokenSequence:
        """Args: a chat, and where it comes from for messages of errors."""
        has_marks = self.template.has_marks
        encoded = self.template.encode(chat, where, return_assistant_tokens_mask=has_marks)
        self.template.check(chat, where)
        turns, ids = self._turns(chat, where), encoded["input_ids"]
        if has_marks:
            spans = self._marked(chat, turns, _spans(encoded["assistant_masks"]), where)
        else:
            spans = self._prefixed(chat, turns, ids, where)
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in spans:
            mask[start:end] = True
        return self._with_images(TokenSequence(torch.tensor(ids), mask), chat, where)

    def prompt_sequence(self, chat: Chat, where: str) -> TokenSequence:
        """Up to where the assistant would write its last turn; empty where the chat starts with that turn."""
        before = chat.until(chat.turns[-1])
        ids = torch.tensor(self.opening(before, where) if before.messages else [], dtype=torch.int64)
        sequence = TokenSequence(ids, torch.zeros(len(ids), dtype=torch.bool))
        return self._with_images(sequence, before, where) if len(ids) else sequence

    def opening(self, chat: Chat, where: str) -> list[int]:
        """Token ids of a chat up to where the assistant would write the next turn."""
        ids = self._opening(chat, where)
        self.template.check(chat, where, add_generation_prompt=True)
        return ids

    def _with_images(self, sequence: TokenSequence, chat: Chat, where: str) -> TokenSequence:
        if self.images is None:
            return sequence
        images = [self.images(part["path"], where) for part in image_parts(chat.messages)]
        return self.images.expand(sequence, images, where)

    def _opening(self, chat: Chat, where: str) -> list[int]:
        return self.template.encode(chat, where, add_generation_prompt=True)["input_ids"] if chat.messages else []

    def _turns(self, chat: Chat, where: str) -> list[int]:
        """Places of the messages that are trained."""
        turns = [turn for turn in chat.trained if self.train_on == "all" or turn == chat.turns[-1]]
        if not turns:
            raise InputError(
                f"{where}: the last turn of the assistant has weight 0, and data.train_on=last trains no other: use "
                "all, or remove the record"
            )
        return turns

    def _marked(self, chat: Chat, turns: list[int], spans: list[Span], where: str) -> list[Span]:
        """Of what the template marks that which belongs to some turns."""
        if not spans:
            raise InputError(f"{where}: the chat template marks no token as the assistant's: {MARKS_REMEDY}")
        if len(turns) == len(chat.turns) == len(spans):
            return spans
        found: list[Span] = []
        counted = 0
        for turn in turns:
            # A turn may have none or several, and earlier turns be written differently once later ones follow.
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
        encoded = self.template.encode(chat, where, return_assistant_tokens_mask=True)
        return len(_spans(encoded["assistant_masks"]))

    def _prefixed(self, chat: Chat, turns: list[int], ids: list[int], where: str) -> list[Span]:
        spans = []
        for turn in turns:
            before = self._opening(chat.until(turn), where)
            through = self.template.encode(chat.until(turn + 1), where)["input_ids"]
            if ids[: len(before)] != before or ids[: len(through)] != through or len(before) >= len(through):
                other = _other_remedy(chat, turn)
                raise InputError(
                    f"{where}: the tokens of assistant turn {turn} cannot be told from the chat template's output "
                    f"(it writes earlier turns differently once later ones follow): {MARKS_REMEDY}{other}"
                )
            spans.append((len(before), len(through)))
        return spans


def _other_remedy(chat: Chat, turn: int) -> str:
    """Than marks, for a turn whose tokens cannot be told: not to train it, if it is not the last."""
    if turn == chat.turns[-1]:
        return ""
    last_alone = "" if chat.start else ", use data.train_on=last"  # which is for chats without a prompt
    return f"{last_alone}, or give turns before the last weight: 0"


def _spans(mask: list[int]) -> list[Span]:
    """Where a mask begins and ends to be set."""
    edges = [i for i, (before, after) in enumerate(itertools.pairwise([0, *mask, 0])) if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))
