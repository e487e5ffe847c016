"""Reading of records: a record holds a chat, a text, a pair of completions, or a prompt, in columns named as in TRL."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import Column
from automodel_rl.data.columns import MISSING, look_up, names_of, optional, required, value_of
from automodel_rl.data.media_files import with_media_files
from automodel_rl.data.messages import Chat, Message, checked_messages, checked_tools
from automodel_rl.errors import InputError


@dataclass(frozen=True)
class Pair:
    """A prompt with a better completion, and the same prompt with a worse one."""

    chosen: Chat
    rejected: Chat


@dataclass(frozen=True)
class Text:
    """A text of which all tokens are trained, written by no chat template."""

    text: str


Reader = Callable[[dict[str, Any], SourceConfig, str], Chat | Text | Pair]
"""A function that reads a record. Its arguments are the record, its source's config, and its place in the data."""

FORMS: tuple[tuple[Column, ...], ...] = (("messages",), ("prompt", "completion"), ("text",))
"""The forms of a record for sft, each by its columns. A form that `columns` names comes first, then the first one."""

NOTHING = (MISSING, None)
"""Values of a column that a record does not have. Datasets fill in nulls."""

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
        with_media_files([], record, config, where)  # which a text has no parts for
        return Text(text)
    if form == ("messages",):
        prompt, messages = [], _messages(record, config, "messages", where)
    else:
        prompt = _messages(record, config, "prompt", where, role="user")
        messages = _messages(record, config, "completion", where, role="assistant")
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

    Without a prompt, the messages with which both completions begin are the prompt. With one, completions may repeat
    it.

    Raises:
        InputError: a column is missing, or a completion does not end with a turn of the assistant that is trained.
    """
    columns: tuple[Column, Column] = ("chosen", "rejected")
    completions = [_messages(record, config, name, where, role="assistant") for name in columns]
    if value_of(record, config, "prompt", where) is MISSING:
        prompt = _common_start(*completions)
        if not prompt:
            raise InputError(
                f"{where}: no column {names_of(config, 'prompt')[0]!r}, and chosen and rejected do not begin with the "
                "same messages: name the column of the prompt in columns: {prompt: NAME}"
            )
    else:
        prompt = _messages(record, config, "prompt", where, role="user")
    completions = [_without_start(completion, prompt) for completion in completions]
    prompt = [*_system(record, config, prompt, where), *prompt]
    tools = _tools(record, config, where)
    chats = []
    for name, messages in zip(columns, completions, strict=True):
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError(f"{where}: {name} must end with a turn of the assistant: add one or remove the record")
        whole = with_media_files([*prompt, *messages], record, config, where)
        chats.append(_with_trained(Chat(whole, tools, start=len(prompt)), f"{where}, {name}"))
    return Pair(*chats)


def _common_start(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """The messages with which both begin, without the last of either."""
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return chosen[:count]


def _without_start(messages: list[Message], prompt: list[Message]) -> list[Message]:
    return messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages


def read_prompt(record: dict[str, Any], config: SourceConfig, where: str) -> Chat:
    """The prompt of a record, from messages or a text.

    Raises:
        InputError: the prompt is missing or empty, or its last turn is the assistant's.
    """
    prompt = _messages(record, config, "prompt", where, role="user")
    if not prompt or prompt[-1]["role"] == "assistant":
        raise InputError(f"{where}: prompt must end with a turn that the assistant can answer")
    prompt = with_media_files([*_system(record, config, prompt, where), *prompt], record, config, where)
    return Chat(prompt, _tools(record, config, where), start=len(prompt))


def read_example(record: dict[str, Any], config: SourceConfig) -> dict[str, Any]:
    """The record with the package's own names for its columns, as reward functions get it."""
    named = {column: value_of(record, config, column, config.path) for column in config.columns}
    return {**record, **{column: value for column, value in named.items() if value is not MISSING}}


def chats_of(held: Chat | Text | Pair, where: str) -> list[tuple[Chat, str]]:
    """The chats of a record, none, one or two, each with its place in the data."""
    if isinstance(held, Text):
        return []
    if isinstance(held, Chat):
        return [(held, where)]
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
