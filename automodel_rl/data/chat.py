"""Chats to token sequences: the chat template's tokens, and which of them the assistant wrote."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from automodel_rl.batch import TokenSequence
from automodel_rl.config.data import SourcesConfig
from automodel_rl.data.images import ImageReader, image_parts
from automodel_rl.errors import InputError

OF_PROCESSOR = "chat_template.json"
"""Where transformers 4 put the chat template of a model with images."""

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Opens the part of a template that the assistant writes."""

PROBE = "xyzzy"
"""A text that no template writes by itself."""

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


class ChatTokenizer:
    """Turns messages into a `TokenSequence` whose loss mask covers the assistant's tokens.

    Where the template marks the assistant's part, the marks decide. Most published templates have no marks; then the
    chat is tokenised up to the start and up to the end of each assistant turn, which works when both are prefixes of
    the whole chat's tokens, and is an error when they are not.

    Args:
        tokenizer: with a chat template.
        train_on: "all" assistant turns, or the "last".
        images: reads them, for a model with an encoder.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str, images: ImageReader | None = None):
        self.tokenizer, self.train_on, self.images = tokenizer, train_on, images
        self.has_marks = bool(GENERATION_MARK.search(str(tokenizer.chat_template)))
        self.reads_parts_only = images is not None and self._loses_texts()

    def __call__(self, messages: list[dict[str, Any]], where: str) -> TokenSequence:
        """Args: messages of one chat, and where they come from for messages of errors."""
        encoded = self._encode(messages, where, return_assistant_tokens_mask=self.has_marks)
        ids = encoded["input_ids"]
        spans = self._marked(encoded["assistant_masks"]) if self.has_marks else self._prefixed(messages, ids, where)
        if not spans:
            raise InputError(f"{where}: the chat template marks no token as the assistant's: {MARKS_REMEDY}")
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for start, end in spans if self.train_on == "all" else spans[-1:]:
            mask[start:end] = True
        return self._with_images(TokenSequence(torch.tensor(ids), mask), messages, where)

    def prompt_sequence(self, messages: list[dict[str, Any]], where: str) -> TokenSequence:
        """What `prompt` gives, with the images of the messages."""
        ids = torch.tensor(self.prompt(messages, where), dtype=torch.int64)
        sequence = TokenSequence(ids, torch.zeros(len(ids), dtype=torch.bool))
        return self._with_images(sequence, messages[: _last_turn(messages)], where) if len(ids) else sequence

    def _with_images(self, sequence: TokenSequence, messages: list[dict[str, Any]], where: str) -> TokenSequence:
        if self.images is None:
            return sequence
        images = [self.images(part["path"], where) for part in image_parts(messages)]
        return self.images.expand(sequence, images, where)

    def prompt(self, messages: list[dict[str, Any]], where: str) -> list[int]:
        """Token ids up to where the assistant would write its last turn; none where the chat starts with that turn."""
        last = _last_turn(messages)
        return self.opening(messages[:last], where) if last else []

    def opening(self, messages: list[dict[str, Any]], where: str) -> list[int]:
        """Token ids of messages up to where the assistant would write the next."""
        return self._encode(messages, where, add_generation_prompt=True)["input_ids"]

    def _loses_texts(self) -> bool:
        """Whether the template passes over contents that are plain texts, as those of models with images may."""
        chat = [{"role": role, "content": PROBE} for role in ("user", "assistant")]
        try:
            return str(self.tokenizer.apply_chat_template(chat, tokenize=False)).count(PROBE) < len(chat)
        except Exception:  # a template is a program of its own; what it refuses, it refuses in the data, too
            return False

    def _encode(self, messages: list[dict[str, Any]], where: str, **options: Any) -> Any:
        if self.images is None and image_parts(messages):
            raise InputError(f"{where}: has an image, and the model only reads text: use a vision-language model")
        if self.reads_parts_only:
            messages = [_in_parts(message) for message in messages]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise InputError(f"{where}: the chat template refuses these messages ({error})") from None

    def _marked(self, mask: list[int]) -> list[Span]:
        edges = [i for i, (before, after) in enumerate(itertools.pairwise([0, *mask, 0])) if before != after]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _prefixed(self, messages: list[dict[str, Any]], ids: list[int], where: str) -> list[Span]:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for turn in turns if self.train_on == "all" else turns[-1:]:
            before = self.prompt(messages[: turn + 1], where)
            through = self._encode(messages[: turn + 1], where)["input_ids"]
            if ids[: len(before)] != before or ids[: len(through)] != through or len(before) >= len(through):
                other = ", or use data.train_on=last" if self.train_on == "all" else ""
                raise InputError(
                    f"{where}: the tokens of assistant turn {turn} cannot be told from the chat template's output "
                    f"(it writes earlier turns differently once later ones follow): {MARKS_REMEDY}{other}"
                )
            spans.append((len(before), len(through)))
        return spans


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _last_turn(messages: list[dict[str, Any]]) -> int:
    """Place of the assistant's last message."""
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")
