"""Reading of records: a record holds a chat, a text, a pair of completions, or a prompt, in columns named as in TRL."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import Column
from automodel_rl.config.run import Records
from automodel_rl.data.characters import check_characters
from automodel_rl.data.columns import MISSING, look_up, names_of, optional, required, value_of
from automodel_rl.data.media_files import with_media_files
from automodel_rl.data.messages import Chat, Message, checked_messages, checked_tools
from automodel_rl.errors import InputError


@dataclass(frozen=True)
class Pair:
    """A prompt with a better completion, and the same prompt with a worse one.

    Attributes:
        margin: how much better it is, on the scale of a reward model's scores; 0 where the data do not say.
    """

    chosen: Chat
    rejected: Chat
    margin: float = 0.0


@dataclass(frozen=True)
class Text:
    """A text of which all tokens are trained, written by no chat template."""

    text: str


@dataclass(frozen=True)
class Judged:
    """A prompt with a completion that is called good or bad."""

    chat: Chat
    is_good: bool


Reader = Callable[[dict[str, Any], SourceConfig, str], Chat | Text | Pair | Judged]
"""A function that reads a record. Its arguments are the record, its source's config, and its place in the data."""

FORMS: tuple[tuple[Column, ...], ...] = (("messages",), ("prompt", "completion"), ("text",))
"""The forms of a record for sft, each by its columns. A form that `columns` names comes first, then the first one."""

NOTHING = (MISSING, None)
"""Values of a column that a record does not have. Datasets fill in nulls."""

LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Labels by their texts, in lower case."""

OTHER_NAMES = {
    "conversations": "{messages: conversations}",
    "conversation": "{messages: conversation}",
    "instruction": "{prompt: [instruction, input], completion: output}",
    "response": "{completion: response}",
}
"""Columns of widespread datasets, with what `columns` should say of them."""


def read_chat(record: dict[str, Any], config: SourceConfig, where: str) -> Chat | Text:
    """The chat or text of a record. Of a prompt and a completion the completion is trained.

    Raises:
        InputError: there are no messages and no text, no turn of the assistant, or no trained turn.
    """
    form = _form(record, config, where)
    if form == ("text",):
        text = required(record, config, "text", where)
        if not isinstance(text, str) or not text:
            raise InputError(f"{where}: text must be a text that is not empty")
        check_characters(text, "text", where)
        with_media_files([], record, config, where)  # which a text has no parts for
        return Text(text)
    if form == ("messages",):
        prompt, messages = [], _messages(record, config, "messages", where)
    else:
        prompt = _messages(record, config, "prompt", where, role="user")
        messages = _messages(record, config, "completion", where, role="assistant")
        prompt, messages = joined(prompt, messages, "completion", where)
    system = _system(record, config, [*prompt, *messages], where)
    messages = with_media_files([*system, *prompt, *messages], record, config, where)
    chat = Chat(messages, _tools(record, config, where), start=len(system) + len(prompt) if prompt else 0)
    if not chat.turns:
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise InputError(f"{where}: no assistant turn to learn from, roles are {roles}: add one or remove the record")
    return _with_trained(chat, where)


def _form(record: dict[str, Any], config: SourceConfig, where: str) -> tuple[Column, ...]:
    """The columns that hold what a record trains."""
    named = [form for form in FORMS if any(column in config.columns for column in form)]
    found_forms = [
        form
        for form in named or FORMS
        if all(any(look_up(record, name) not in NOTHING for name in names_of(config, column)) for column in form)
    ]
    if found_forms[:2] == [*FORMS[:2]]:
        raise InputError(
            f"{where}: has messages, and a prompt with a completion: name the one that is meant, as in columns: "
            "{messages: messages}"
        )
    if found_forms:
        return found_forms[0]
    if named:
        return named[0]
    found = ", ".join(record) or "none"
    remedy = next((text for name, text in OTHER_NAMES.items() if name in record), "{messages: NAME}")
    raise InputError(
        f"{where}: no column 'messages', no 'prompt' with 'completion' and no 'text', only {found}: name them in "
        f"columns, as in columns: {remedy}"
    )


def _with_trained(chat: Chat, where: str) -> Chat:
    if not chat.trained:
        reason = "all turns of the assistant have weight 0" if chat.turns else "there is no turn of the assistant"
        raise InputError(f"{where}: {reason}: give one weight 1, or remove the record")
    return chat


def read_pair(record: dict[str, Any], config: SourceConfig, where: str) -> Pair:
    """The pair of a record, from its columns prompt, chosen and rejected. Each holds messages or a text.

    Without a prompt, the messages with which both completions begin are the prompt. With one, completions may hold it.

    Raises:
        InputError: a column is missing, or a completion does not end with a turn of the assistant that is trained.
    """
    columns: tuple[Column, Column] = ("chosen", "rejected")
    completions = [_messages(record, config, name, where, role="assistant") for name in columns]
    for name, messages in zip(columns, completions, strict=True):
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError(f"{where}: {name} must end with a turn of the assistant: add one or remove the record")
    if value_of(record, config, "prompt", where) is MISSING:
        prompt = _common_start(*completions)
        if not prompt:
            raise InputError(
                f"{where}: no column {names_of(config, 'prompt')[0]!r}, and chosen and rejected do not begin with the "
                "same messages: name the column of the prompt in columns: {prompt: NAME}"
            )
    else:
        prompt = _messages(record, config, "prompt", where, role="user")
    named = zip(columns, completions, strict=True)
    (prompt, chosen), (other, rejected) = (joined(prompt, messages, name, where) for name, messages in named)
    if prompt != other:
        raise InputError(
            f"{where}: chosen and rejected hold other messages before their answers: give both the same, or remove the "
            "record"
        )
    prompt = [*_system(record, config, prompt, where), *prompt]
    tools = _tools(record, config, where)
    chats = []
    for name, messages in zip(columns, (chosen, rejected), strict=True):
        whole = with_media_files([*prompt, *messages], record, config, where)
        chats.append(_with_trained(Chat(whole, tools, start=len(prompt)), f"{where}, {name}"))
    return Pair(chats[0], chats[1])


def read_ranked_pair(record: dict[str, Any], config: SourceConfig, where: str) -> Pair:
    """The pair of a record, with its margin if there is a column of them.

    Raises:
        InputError: as `read_pair`, or the margin is no finite number.
    """
    given = margin = optional(record, config, "margin", where)
    if isinstance(margin, str):  # a table has texts only
        with contextlib.suppress(ValueError):
            margin = float(margin) if margin.strip() else None
    if isinstance(margin, bool) or not isinstance(margin or 0.0, int | float) or not math.isfinite(margin or 0.0):
        raise InputError(f"{where}: margin is {given!r}: give a finite number, or leave the column out")
    return replace(read_pair(record, config, where), margin=float(margin or 0.0))


def read_judged(record: dict[str, Any], config: SourceConfig, where: str) -> Judged:
    """The prompt and completion of a record, or its messages, with its label.

    Raises:
        InputError: as `read_chat`, the record is a text, or its label is neither true nor false.
    """
    label = required(record, config, "label", where)
    if isinstance(label, str):  # a table has texts only
        label = LABELS.get(label.strip().lower(), label)
    if label not in (True, False):
        raise InputError(f"{where}: label is {label!r}: give true for a good completion, false for a bad one")
    chat = read_chat(record, config, where)
    if isinstance(chat, Text):
        raise InputError(f"{where}: a text has no completion to judge: give prompt and completion, or messages")
    return Judged(chat, bool(label))


def _common_start(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The messages with which both begin, without the last of either."""
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return chosen[:count]


def joined(
    prompt: list[Message], completion: list[Message], name: str, where: str
) -> tuple[list[Message], list[Message]]:
    """A prompt and a completion that may hold the prompt, or a part of it, once more.

    Completions of many datasets are whole chats, whose prompt differs a little from the prompt's column: in white
    space, or by a system message. Then the chat's own messages are the prompt.

    Args:
        prompt: the prompt's messages.
        completion: the completion's messages.
        name: the completion's column, for error messages.
        where: the record's place in the data, for error messages.

    Returns:
        The messages before the trained ones, and those from there on.

    Raises:
        InputError: the completion begins with other messages than the assistant's, which are not the prompt.
    """
    asked = [_said(message) for message in prompt if message["role"] != "system"]
    held = [_said(message) for message in completion]
    starts = range(len(held) - len(asked) + 1) if completion and _asks(completion[0]) else range(1)
    for start in starts:
        if asked and held[start : start + len(asked)] == asked:
            end = start + len(asked)
            own, given = ([m for m in messages if m["role"] == "system"] for messages in (completion[:end], prompt))
            if own and given and [*map(_said, own)] != [*map(_said, given)]:
                break
            return [*(given if not own else []), *completion[:end]], completion[end:]
    if not prompt or not completion or not _asks(prompt[-1]) or not _asks(completion[0]):
        return prompt, completion
    # The completion may go on from a later message of the prompt.
    for count in range(len(asked) - 1, 0, -1):
        if held[:count] == asked[-count:]:
            return prompt, completion[count:]
    raise InputError(
        f"{where}: {name} begins with a turn of role {completion[0]['role']}, which is not the prompt and follows it: "
        f"leave it out of {name}, put it into the prompt, or leave out the column of the prompt"
    )


def _asks(message: Message) -> bool:
    """Whether an answer of the assistant may follow a message, and the message is no tool's."""
    return message["role"] in ("system", "developer", "user")


def _said(message: Message) -> tuple[str, Any]:
    """What two messages have in common that are the same but for white space."""
    content = message.get("content")
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    return message["role"], " ".join(content.split()) if isinstance(content, str) else content


def read_prompt(record: dict[str, Any], config: SourceConfig, where: str) -> Chat:
    """The prompt of a record, from messages or a text.

    Raises:
        InputError: the prompt is missing or empty, its last turn is the assistant's, or a column has a character that
            no tokenizer reads.
    """
    for name, value in record.items():  # rewards get all of it
        check_characters(value, name, where)
    prompt = _messages(record, config, "prompt", where, role="user")
    if not prompt or prompt[-1]["role"] == "assistant":
        raise InputError(f"{where}: prompt must end with a turn that the assistant can answer")
    prompt = with_media_files([*_system(record, config, prompt, where), *prompt], record, config, where)
    return Chat(prompt, _tools(record, config, where), start=len(prompt))


def read_example(record: dict[str, Any], config: SourceConfig) -> dict[str, Any]:
    """The record with the package's own names for its columns, as reward functions get it."""
    named = {column: value_of(record, config, column, config.path) for column in config.columns}
    return {**record, **{column: value for column, value in named.items() if value is not MISSING}}


def chats_of(held: Chat | Text | Pair | Judged, where: str) -> list[tuple[Chat, str]]:
    """The chats of a record, none, one or two, each with its place in the data."""
    if isinstance(held, Text):
        return []
    if isinstance(held, Chat | Judged):
        return [(held if isinstance(held, Chat) else held.chat, where)]
    return [(held.chosen, f"{where}, chosen"), (held.rejected, f"{where}, rejected")]


def _system(record: dict[str, Any], config: SourceConfig, messages: list[Message], where: str) -> list[Message]:
    """The system message that a record gets: from its column, else the source's; none if it begins
    with one."""
    text = optional(record, config, "system", where) or config.system
    if not text or (messages and messages[0]["role"] in ("system", "developer")):
        return []
    return checked_messages([{"role": "system", "content": text}], "system", where)


def _tools(record: dict[str, Any], config: SourceConfig, where: str) -> tuple[dict[str, Any], ...]:
    return checked_tools(optional(record, config, "tools", where), names_of(config, "tools")[0], where)


def _messages(
    record: dict[str, Any], config: SourceConfig, column: Column, where: str, role: str | None = None
) -> list[Message]:
    """The messages of a column, without the keys that the source's config ignores."""
    value = required(record, config, column, where)
    if isinstance(value, list):
        value = [{k: v for k, v in m.items() if k not in config.ignore} if isinstance(m, dict) else m for m in value]
    return checked_messages(value, column, where, role)


READERS: dict[Records, Reader] = {
    "chats": read_chat,
    "pairs": read_pair,
    "ranked pairs": read_ranked_pair,
    "judged": read_judged,
    "prompts": read_prompt,
}
"""How records are read, by what they hold."""
