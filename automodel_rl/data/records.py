"""Readers of records: chats, texts, pairs of completions and prompts, with columns named as in TRL."""

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
    """A prompt with a chosen and with a rejected completion.

    Attributes:
        margin: preference strength in units of a reward model's scores; 0 if the data have none.
    """

    chosen: Chat
    rejected: Chat
    margin: float = 0.0


@dataclass(frozen=True)
class Text:
    """A plain text outside any chat template. All its tokens are trained."""

    text: str


@dataclass(frozen=True)
class LabelledCompletion:
    """A prompt with a completion labelled good or bad."""

    chat: Chat
    is_good: bool


Reader = Callable[[dict[str, Any], SourceConfig, str], Chat | Text | Pair | LabelledCompletion]
"""Reads a record, given its source's config and its location in the data."""

FORMS: tuple[tuple[Column, ...], ...] = (("messages",), ("prompt", "completion"), ("text",))
"""Columns of the possible forms of an sft record. Forms whose columns are named in `columns` take precedence, then the
first."""

NOTHING = (MISSING, None)
"""Values of an absent column. Datasets fill in nulls."""

LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Labels by their lower-case texts."""

OTHER_NAMES = {
    "conversations": "{messages: conversations}",
    "conversation": "{messages: conversation}",
    "instruction": "{prompt: [instruction, input], completion: output}",
    "response": "{completion: response}",
}
"""Columns of popular datasets, with the `columns` setting for each."""


def read_chat(record: dict[str, Any], config: SourceConfig, where: str) -> Chat | Text:
    """Reads a chat or text with something to train on. Of a prompt with a completion, the completion is trained."""
    form = _form(record, config, where)
    if form == ("text",):
        text = required(record, config, "text", where)
        if not isinstance(text, str) or not text:
            raise InputError(f"{where}: text must be a non-empty string")
        check_characters(text, "text", where)
        with_media_files([], record, config, where)  # raises if there are files: a text has no parts for them
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
        raise InputError(f"{where}: no assistant turn to train on, roles are {roles}: add one or remove the record")
    return _with_trained(chat, where)


def _form(record: dict[str, Any], config: SourceConfig, where: str) -> tuple[Column, ...]:
    """Returns the columns that hold a record's training content."""
    named = [form for form in FORMS if any(column in config.columns for column in form)]
    found_forms = [
        form
        for form in named or FORMS
        if all(any(look_up(record, name) not in NOTHING for name in names_of(config, column)) for column in form)
    ]
    if found_forms[:2] == [*FORMS[:2]]:
        raise InputError(
            f"{where}: has both messages and a prompt with a completion: name the one to use, as in columns: "
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
        reason = "all turns of the assistant have weight 0" if chat.turns else "no turn of the assistant"
        raise InputError(f"{where}: {reason}: set weight 1 for one, or remove the record")
    return chat


def read_pair(record: dict[str, Any], config: SourceConfig, where: str) -> Pair:
    """Reads a pair from the columns prompt, chosen and rejected, each a list of messages or a text.

    Without a prompt, the common initial messages of both completions are the prompt. With one, completions may repeat
    it.
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
                f"{where}: no column {names_of(config, 'prompt')[0]!r}, but chosen and rejected do not begin with the "
                "same messages: name the column of the prompt in columns: {prompt: NAME}"
            )
    else:
        prompt = _messages(record, config, "prompt", where, role="user")
    named = zip(columns, completions, strict=True)
    (prompt, chosen), (other, rejected) = (joined(prompt, messages, name, where) for name, messages in named)
    if prompt != other:
        raise InputError(
            f"{where}: chosen and rejected have different messages before their answers: use the same in both, or "
            "remove the record"
        )
    prompt = [*_system(record, config, prompt, where), *prompt]
    tools = _tools(record, config, where)
    chats = []
    for name, messages in zip(columns, (chosen, rejected), strict=True):
        whole = with_media_files([*prompt, *messages], record, config, where)
        chats.append(_with_trained(Chat(whole, tools, start=len(prompt)), f"{where}, {name}"))
    return Pair(chats[0], chats[1])


def read_ranked_pair(record: dict[str, Any], config: SourceConfig, where: str) -> Pair:
    """Reads a pair with its margin, if there is a column for it."""
    given = margin = optional(record, config, "margin", where)
    if isinstance(margin, str):  # tables hold strings only
        with contextlib.suppress(ValueError):
            margin = float(margin) if margin.strip() else None
    if isinstance(margin, bool) or not isinstance(margin or 0.0, int | float) or not math.isfinite(margin or 0.0):
        raise InputError(f"{where}: margin is {given!r}: use a finite number, or remove the column")
    return replace(read_pair(record, config, where), margin=float(margin or 0.0))


def read_labelled(record: dict[str, Any], config: SourceConfig, where: str) -> LabelledCompletion:
    """Reads a prompt and completion, or messages, with the label."""
    label = required(record, config, "label", where)
    if isinstance(label, str):  # tables hold strings only
        label = LABELS.get(label.strip().lower(), label)
    if label not in (True, False):
        raise InputError(f"{where}: label is {label!r}: use true for a good completion, false for a bad one")
    chat = read_chat(record, config, where)
    if isinstance(chat, Text):
        raise InputError(f"{where}: a text has no completion to judge: use prompt and completion, or messages")
    return LabelledCompletion(chat, bool(label))


def _common_start(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Returns the common initial messages of both completions, excluding the last of either."""
    count = 0
    while count < min(len(chosen), len(rejected)) - 1 and chosen[count] == rejected[count]:
        count += 1
    return chosen[:count]


def joined(
    prompt: list[Message], completion: list[Message], name: str, where: str
) -> tuple[list[Message], list[Message]]:
    """Separates a prompt from a completion that may repeat all or part of it. Returns the messages before the trained
    ones, and the others.

    The completions of many datasets are whole chats, whose prompt differs slightly from the prompt column, in white
    space or by a system message. The chat's own messages are then the prompt. Raises InputError if the completion
    begins with messages of other roles that are not the prompt. `name` is the completion's column.
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
    # The completion may repeat only the last messages of the prompt.
    for count in range(len(asked) - 1, 0, -1):
        if held[:count] == asked[-count:]:
            return prompt, completion[count:]
    raise InputError(
        f"{where}: {name} begins with a turn of role {completion[0]['role']}, which follows the prompt but is not part "
        f"of it: remove it from {name}, add it to the prompt, or remove the prompt column"
    )


def _asks(message: Message) -> bool:
    """Whether a message invites the assistant's answer and is not a tool's."""
    return message["role"] in ("system", "developer", "user")


def _said(message: Message) -> tuple[str, Any]:
    """Returns role and content, with white space normalised, for comparing messages."""
    content = message.get("content")
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    return message["role"], " ".join(content.split()) if isinstance(content, str) else content


def read_prompt(record: dict[str, Any], config: SourceConfig, where: str) -> Chat:
    """Reads a prompt from messages or a text. Checks the characters of all columns, since rewards receive them."""
    for name, value in record.items():  # all of them are passed to rewards
        check_characters(value, name, where)
    prompt = _messages(record, config, "prompt", where, role="user")
    if not prompt or prompt[-1]["role"] == "assistant":
        raise InputError(f"{where}: prompt must end with a turn that the assistant can answer")
    prompt = with_media_files([*_system(record, config, prompt, where), *prompt], record, config, where)
    return Chat(prompt, _tools(record, config, where), start=len(prompt))


def read_example(record: dict[str, Any], config: SourceConfig) -> dict[str, Any]:
    """Returns a record as passed to reward functions, with the package's own column names added."""
    named = {column: value_of(record, config, column, config.path) for column in config.columns}
    return {**record, **{column: value for column, value in named.items() if value is not MISSING}}


def chats_of(held: Chat | Text | Pair | LabelledCompletion, where: str) -> list[tuple[Chat, str]]:
    """Returns the chats of a record (at most two), each with its location in the data."""
    if isinstance(held, Text):
        return []
    if isinstance(held, Chat | LabelledCompletion):
        return [(held if isinstance(held, Chat) else held.chat, where)]
    return [(held.chosen, f"{where}, chosen"), (held.rejected, f"{where}, rejected")]


def _system(record: dict[str, Any], config: SourceConfig, messages: list[Message], where: str) -> list[Message]:
    """Returns the system message to prepend, from the record's column or else the source; none if the record has its
    own."""
    text = optional(record, config, "system", where) or config.system
    if not text or (messages and messages[0]["role"] in ("system", "developer")):
        return []
    return checked_messages([{"role": "system", "content": text}], "system", where)


def _tools(record: dict[str, Any], config: SourceConfig, where: str) -> tuple[dict[str, Any], ...]:
    return checked_tools(optional(record, config, "tools", where), names_of(config, "tools")[0], where)


def _messages(
    record: dict[str, Any], config: SourceConfig, column: Column, where: str, role: str | None = None
) -> list[Message]:
    """Reads the messages of a column, without ignored keys."""
    value = required(record, config, column, where)
    if isinstance(value, list):
        value = [{k: v for k, v in m.items() if k not in config.ignore} if isinstance(m, dict) else m for m in value]
    return checked_messages(value, column, where, role)


READERS: dict[Records, Reader] = {
    "chats": read_chat,
    "pairs": read_pair,
    "ranked pairs": read_ranked_pair,
    "judged": read_labelled,
    "prompts": read_prompt,
}
"""Reader for each type of records."""
