"""A tokenizer's chat template: what it makes of chats, and what of them it leaves out."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from automodel_rl.data.images import image_parts
from automodel_rl.data.messages import Chat, Message, function_of
from automodel_rl.errors import InputError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Opens the part of a template that the assistant writes."""

PROBE = "xyzzy"
"""A text that no template writes by itself."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of what the assistant thinks before it speaks."""

BEGIN_THOUGHT, END_THOUGHT = "<think>", "</think>"
"""Around thoughts that are part of the content."""

LINKS = ("name", "tool_call_id")
"""Keys of a tool's message that say which call it answers, which its place says, too."""

ARGUMENTS = "arguments"
"""Key of what a tool is called with: JSON or an object."""

REMEDY = "give data.chat_template a template that writes it, or remove it from the data"

Tree = dict[str, Any]
"""`messages` and `tools` of a chat."""


@dataclass(frozen=True)
class Leaf:
    """Something in a chat that the template should write.

    Attributes:
        path: to it in the tree.
        before: of the text at that place only what comes before this is meant; all of it if empty.
    """

    path: tuple[str | int, ...]
    before: str = ""

    @property
    def turn(self) -> int:
        """Of the message it is in; -1 for a tool."""
        return int(self.path[1]) if self.path[0] == "messages" else -1

    @property
    def is_thought(self) -> bool:
        return bool(self.before) or self.path[-1] in THOUGHTS


class ChatTemplate:
    """Writes chats as text and as tokens.

    Args:
        tokenizer: with a chat template.
        sees_images: the model reads images.

    Attributes:
        has_marks: whether the template marks what the assistant writes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sees_images: bool):
        self.tokenizer, self.sees_images = tokenizer, sees_images
        self.has_marks = bool(GENERATION_MARK.search(str(tokenizer.chat_template)))
        self.reads_parts_only = self._reads_parts_only()
        self.quotes_arguments = self._quotes_arguments()

    def encode(self, chat: Chat, where: str, **options: Any) -> Any:
        """What the tokenizer gives for a chat.

        Args:
            chat: to write.
            where: in the data, for messages.
            options: of `apply_chat_template`.

        Raises:
            InputError: the template refuses it.
        """
        if not self.sees_images and image_parts(chat.messages):
            raise InputError(f"{where}: has an image, and the model only reads text: use a vision-language model")
        tree = self._tree(chat)
        try:
            return self.tokenizer.apply_chat_template(
                tree["messages"], tools=tree["tools"] or None, tokenize=True, return_dict=True, **options
            )
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise InputError(f"{where}: the chat template refuses these messages ({error})") from None

    def check(self, chat: Chat, where: str, add_generation_prompt: bool = False) -> None:
        """Raises InputError if the template leaves out something of a chat that it can `encode`.

        Everything is marked and the chat written once more; a mark that does not come out, and changes nothing if it
        is the only one, belongs to something that the template does not read.
        """
        tree = self._tree(chat)
        leaves = [*_leaves(tree)]
        marked = tree
        for number, leaf in enumerate(leaves):
            marked = _marked(marked, leaf, _mark(number))
        text = self._text(marked, add_generation_prompt) or ""
        missing = [leaf for number, leaf in enumerate(leaves) if _mark(number) not in text]
        for leaf in missing:
            if self._reads(tree, leaf, add_generation_prompt) or self._may_forget(chat, leaf):
                continue
            raise InputError(f"{where}: the chat template leaves out {_label(chat, leaf)}: {REMEDY}")

    def _may_forget(self, chat: Chat, leaf: Leaf) -> bool:
        """Whether this is a thought of a turn before the user's last, where templates write it no more: of a turn that
        is not trained, or says more, and whose thoughts the template writes while it is the last."""
        if not leaf.is_thought or all(message["role"] != "user" for message in chat.messages[leaf.turn :]):
            return False
        if leaf.turn not in chat.trained:
            return True
        message = chat.messages[leaf.turn]
        says_more = bool(_spoken(message).strip() or message.get("tool_calls"))
        return says_more and self._reads(self._tree(chat.until(leaf.turn + 1)), leaf)

    def _reads(self, tree: Tree, leaf: Leaf, add_generation_prompt: bool = False) -> bool:
        """Whether the text differs if only this does."""
        changed = self._text(_marked(tree, leaf, PROBE), add_generation_prompt)
        return changed is None or changed != self._text(tree, add_generation_prompt)

    def _text(self, tree: Tree, add_generation_prompt: bool = False) -> str | None:
        """What the template writes; None if it raises, for which it must have read something."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    tree["messages"],
                    tools=tree["tools"] or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except Exception:  # as in `encode`
            return None

    def _reads_parts_only(self) -> bool:
        """Whether contents must be lists of parts, as with some models that read images."""
        roles = ("user", "assistant")
        texts = [{"role": role, "content": PROBE} for role in roles]
        num_texts, num_parts = (
            (self._text({"messages": messages, "tools": []}) or "").count(PROBE)
            for messages in (texts, [_in_parts(message) for message in texts])
        )
        return num_texts < len(roles) <= num_parts

    def _quotes_arguments(self) -> bool:
        """Whether JSON in arguments comes out as JSON of a text, so that they must be objects."""
        function = {"name": PROBE, ARGUMENTS: json.dumps({PROBE: PROBE})}
        calls = [{"id": "123456789", "type": "function", "function": function}]
        messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": "", "tool_calls": calls}]
        return f'\\"{PROBE}' in (self._text({"messages": messages, "tools": []}) or "")

    def _tree(self, chat: Chat) -> Tree:
        """The chat in the form that the template reads."""
        form = _in_parts if self.reads_parts_only else _in_one
        messages = [form({k: v for k, v in message.items() if k != "weight"}) for message in chat.messages]
        if self.quotes_arguments:
            messages = [_with_objects(message) for message in messages]
        return {"messages": messages, "tools": list(chat.tools)}


def _in_parts(message: Message) -> Message:
    """A message whose content is a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _in_one(message: Message) -> Message:
    """A message whose content is one text, if its parts are texts."""
    content = message.get("content")
    if not isinstance(content, list) or any(part["type"] != "text" for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _with_objects(message: Message) -> Message:
    """A message whose calls have objects for arguments where these are JSON of one."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = function_of(call)
        function = {**function, ARGUMENTS: _parsed(function[ARGUMENTS])} if ARGUMENTS in function else function
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _parsed(arguments: Any) -> Any:
    try:
        value = json.loads(arguments)
    except (TypeError, ValueError):  # objects already, or no JSON
        return arguments
    return value if isinstance(value, dict) else arguments


def _leaves(tree: Tree) -> Iterator[Leaf]:
    """All that the template should write. What is empty or false says nothing."""
    for number, tool in enumerate(tree["tools"]):
        yield Leaf(("tools", number, *_function_path(tool), "name"))
    for turn, message in enumerate(tree["messages"]):
        skipped = ("role", *LINKS) if message["role"] == "tool" else ("role",)
        for key, value in message.items():
            if key in skipped or not value:
                continue
            path = ("messages", turn, key)
            if key == "content":
                yield from _leaves_of_content(path, value, message["role"])
            elif key == "tool_calls":
                yield from _leaves_of_calls(path, value)
            else:
                yield Leaf(path)


def _leaves_of_content(path: tuple[str | int, ...], content: Any, role: str) -> Iterator[Leaf]:
    texts = {path: content} if isinstance(content, str) else {
        (*path, place, "text"): part["text"] for place, part in enumerate(content) if part.get("text")
    }  # fmt: skip
    for place, text in texts.items():
        yield Leaf(place)
        if role == "assistant" and _thought(text):
            yield Leaf(place, before=END_THOUGHT)


def _leaves_of_calls(path: tuple[str | int, ...], calls: list[dict[str, Any]]) -> Iterator[Leaf]:
    for number, call in enumerate(calls):
        inner = (*path, number, *_function_path(call))
        yield Leaf((*inner, "name"))
        if function_of(call).get(ARGUMENTS):
            yield Leaf((*inner, ARGUMENTS))


def _function_path(tool: dict[str, Any]) -> tuple[str, ...]:
    return ("function",) if "function" in tool else ()


def _thought(text: str) -> str:
    """What is thought in a content, if it says so."""
    thought, end, _ = text.partition(END_THOUGHT)
    return thought.rpartition(BEGIN_THOUGHT)[2].strip() if end else ""


def _spoken(message: Message) -> str:
    """The text of a message without thoughts."""
    content = _in_one(message).get("content")
    return content.rpartition(END_THOUGHT)[2] if isinstance(content, str) else ""


def _mark(number: int) -> str:
    return f"{PROBE}{number}{PROBE}"


def _marked(tree: Any, leaf: Leaf, mark: str) -> Any:
    """A copy of the tree with a mark in one place."""

    def replaced(value: Any, path: tuple[str | int, ...]) -> Any:
        if not path:
            return _with_mark(value, leaf, mark)
        key, *rest = path
        copy: Any = {**value} if isinstance(value, dict) else [*value]
        copy[key] = replaced(value[key], tuple(rest))
        return copy

    return replaced(tree, leaf.path)


def _with_mark(value: Any, leaf: Leaf, mark: str) -> Any:
    """A text with the mark in it, arguments with one more, and nothing in place of anything else."""
    if isinstance(value, str):
        head, end, tail = value.partition(leaf.before) if leaf.before else (value, "", "")
        return f"{head}{mark}{end}{tail}"
    return {**value, mark: mark} if isinstance(value, dict) and leaf.path[-1] == ARGUMENTS else None


def _label(chat: Chat, leaf: Leaf) -> str:
    if leaf.turn < 0:
        return f"tools, such as {function_of(chat.tools[int(leaf.path[1])])['name']!r}"
    key = ".".join(str(step) for step in leaf.path[2:])
    what = f"what comes before {END_THOUGHT} in {key}" if leaf.before else key
    return f"{what} of turn {leaf.turn} (role {chat.messages[leaf.turn]['role']})"
