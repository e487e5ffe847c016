"""A tokenizer's chat template: writes chats, and finds parts of a chat that the template leaves out."""

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, meta
from transformers import PreTrainedTokenizerBase

from automodel_rl.data.kinds import (
    ARGUMENTS,
    BEGIN_THOUGHT,
    END_THOUGHT,
    THOUGHTS,
    facts_of,
    says_more,
    thought_in,
    with_objects,
)
from automodel_rl.data.messages import Chat, Message, function_of, media_parts
from automodel_rl.errors import InputError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Pattern of the mark in a template that begins what the assistant writes."""

PROBE = "xyzzy"
"""A text that no template contains."""

MARK = re.compile(f"{PROBE}([0-9]+){PROBE}")
"""Pattern of a mark: the text that is added to a numbered place of a chat."""

OTHER = "\ue000"
"""A text of one character that no chat contains."""

QUESTION: Message = {"role": "user", "content": PROBE}

LINKS = ("name", "tool_call_id")
"""Keys of a tool's message that name the call it answers. The message's place says the same."""

REMEDY = "give data.chat_template a template that writes it, or remove it from the data"
"""The remedy for a part that a template leaves out."""

Tree = dict[str, Any]
"""The `messages` and `tools` of a chat."""


@dataclass(frozen=True)
class Leaf:
    """A value in a chat that the template should write.

    Attributes:
        path: the keys and places that lead to the value in the tree.
        before: if not empty, the leaf is only the part of the text before this mark.
    """

    path: tuple[str | int, ...]
    before: str = ""

    @property
    def turn(self) -> int:
        """Place of the message that holds the leaf; -1 for a tool."""
        return int(self.path[1]) if self.path[0] == "messages" else -1

    @property
    def is_thought(self) -> bool:
        return bool(self.before) or self.path[-1] in THOUGHTS


class ChatTemplate:
    """Writes chats as text and as tokens.

    Args:
        tokenizer: a tokenizer with a chat template.
        reads: types of parts besides text that the model reads: "image", "audio".
        variables: further variables for the template.

    Raises:
        InputError: the template does not read a variable.

    Attributes:
        has_marks: whether the template marks what the assistant writes.
        reads_parts_only: whether contents must be lists of parts.
        quotes_arguments: whether arguments of calls must be objects, not JSON.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reads: Collection[str] = (),
        variables: Mapping[str, Any] | None = None,
    ):
        self.tokenizer, self.reads, self.variables = tokenizer, reads, dict(variables or {})
        _check_variables(self.variables, str(tokenizer.chat_template))
        self.has_marks = bool(GENERATION_MARK.search(str(tokenizer.chat_template)))
        self.reads_parts_only = self._reads_parts_only()
        self.quotes_arguments = self._quotes_arguments()
        self._accepted: set[Any] = set()

    def encode(self, chat: Chat, where: str, **options: Any) -> Any:
        """A chat, written by the template and tokenised.

        Args:
            chat: the chat to write.
            where: its place in the data, for error messages.
            options: further arguments of `apply_chat_template`.

        Returns:
            The tokenizer's mapping, with `input_ids`.

        Raises:
            InputError: the template refuses the chat, or it has media that the model cannot read.
        """
        if self.tokenizer.chat_template is None:
            raise InputError(f"{where}: the tokenizer has no chat template for it: give one in data.chat_template")
        for kind in {part["type"] for part in media_parts(chat.messages)} - {*self.reads}:
            read = ", ".join(["text", *self.reads])
            raise InputError(f"{where}: has a part of type {kind}, and the model reads {read} only: use another model")
        tree = self._tree(chat)
        try:
            return self.tokenizer.apply_chat_template(
                tree["messages"],
                tools=tree["tools"] or None,
                tokenize=True,
                return_dict=True,
                **options,
                **self.variables,
            )
        except Exception as error:  # a template is a program, and may raise any error
            raise InputError(f"{where}: the chat template refuses these messages ({error})") from None

    def text(self, chat: Chat, changed_turn: int | None = None) -> str | None:
        """What the template writes, with all texts of one turn changed if that is named; None if it raises."""
        tree = self._tree(chat)
        if changed_turn is not None:
            tree = _copied(tree)
            for leaf in [*_leaves(tree)]:
                if leaf.turn == changed_turn and _takes_mark(tree, leaf):
                    *path, key = leaf.path
                    holder = _at(tree, path)
                    holder[key] = OTHER if isinstance(holder[key], str) else {OTHER: OTHER}
        return self._text(tree)

    def opening_text(self, chat: Chat) -> str:
        """The text of a chat, ready for the assistant's next turn. Raises InputError if the template refuses it."""
        text = self._text(self._tree(chat), add_generation_prompt=True)
        if text is not None:
            return text
        raise InputError(f"the chat template refuses a message of {chat.messages[-1]['role']} there")

    @functools.cached_property
    def header(self) -> str:
        """What the template writes before an answer of the assistant; empty if that cannot be told.

        A template may begin the answer itself, with thoughts or with none. That is not part of the header.
        """
        question: Tree = {"messages": [_in_parts(QUESTION) if self.reads_parts_only else QUESTION], "tools": []}
        before, asking = self._text(question), self._text(question, add_generation_prompt=True)
        if before is None or asking is None or not asking.startswith(before):
            return ""
        return asking[len(before) :].partition(BEGIN_THOUGHT)[0]

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokenizer's special tokens."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple({*added, *self.tokenizer.all_special_tokens})

    def check(self, chat: Chat, where: str, add_generation_prompt: bool = False) -> None:
        """Raises InputError if the template leaves out a part of a chat that it can `encode`.

        All leaves get a mark, and the template writes the chat. Each leaf whose mark is missing in the result is then
        changed alone: if the result changes, the template reads the leaf. This second test writes the chat again for
        each such leaf, so it is done only once for all leaves in the same situation.

        Args:
            chat: the chat.
            where: its place in the data, for error messages.
            add_generation_prompt: write the chat ready for the assistant's next turn.
        """
        tree = self._tree(chat)
        leaves = [*_leaves(tree)]
        marks = {leaf: _mark(number) for number, leaf in enumerate(leaves) if _takes_mark(tree, leaf)}
        text = self._text(_marked(tree, marks), add_generation_prompt) or ""
        found = {int(number) for number in MARK.findall(text)}
        for leaf in (leaf for number, leaf in enumerate(leaves) if number not in found):
            situation = (_situation(chat, leaf), add_generation_prompt)
            if situation in self._accepted:
                continue
            if not (self._may_forget(chat, leaf) or self._reads(tree, leaf, add_generation_prompt)):
                raise InputError(f"{where}: the chat template leaves out {_label(chat, leaf)}: {REMEDY}{_ignore(leaf)}")
            self._accepted.add(situation)

    def _may_forget(self, chat: Chat, leaf: Leaf) -> bool:
        """Whether a template may leave out a leaf: a thought in a turn before the user's last message.

        If the turn is trained, it must also have a text or a call besides the thought, and the template must write the
        thought when the chat ends with that turn.
        """
        if not leaf.is_thought or leaf.turn not in chat.turns or leaf.turn > chat.last_of_user:
            return False
        if leaf.turn not in chat.trained:
            return True
        return says_more(chat.messages[leaf.turn]) and self._reads(self._tree(chat.until(leaf.turn + 1)), leaf)

    def _reads(self, tree: Tree, leaf: Leaf, add_generation_prompt: bool = False) -> bool:
        """Whether the template's text changes when only this leaf is changed."""
        changed = self._text(_marked(tree, {leaf: PROBE}), add_generation_prompt)
        # A template that raises has read the change.
        return changed is None or changed != self._text(tree, add_generation_prompt)

    def _text(self, tree: Tree, add_generation_prompt: bool = False) -> str | None:
        """The text that the template writes; None if it raises."""
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    tree["messages"],
                    tools=tree["tools"] or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self.variables,
                )
            )
        except Exception:  # as in `encode`
            return None

    def _reads_parts_only(self) -> bool:
        """Whether contents must be lists of parts, as for some models that read images."""
        roles = ("user", "assistant")
        texts = [{"role": role, "content": PROBE} for role in roles]
        num_texts, num_parts = (
            (self._text({"messages": messages, "tools": []}) or "").count(PROBE)
            for messages in (texts, [_in_parts(message) for message in texts])
        )
        return num_texts < len(roles) <= num_parts

    def _quotes_arguments(self) -> bool:
        """Whether the template writes JSON arguments as a quoted text. Then arguments must be objects."""
        function = {"name": PROBE, ARGUMENTS: json.dumps({PROBE: PROBE})}
        calls = [{"id": "123456789", "type": "function", "function": function}]
        messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": "", "tool_calls": calls}]
        return f'\\"{PROBE}' in (self._text({"messages": messages, "tools": []}) or "")

    def _tree(self, chat: Chat) -> Tree:
        """The chat in the form that the template reads."""
        form = _in_parts if self.reads_parts_only else _in_one
        messages = [form({k: v for k, v in message.items() if k != "weight"}) for message in chat.messages]
        if self.quotes_arguments:
            messages = [with_objects(message) for message in messages]
        return {"messages": messages, "tools": list(chat.tools)}


def _check_variables(variables: Mapping[str, Any], template: str) -> None:
    """Raises InputError for a variable that the template does not read, or that a chat sets itself."""
    if not variables:
        return
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)  # transformers' own tag
    read = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    read -= {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
    for name in variables:
        if name not in read:
            raise InputError(
                f"data.chat_template_kwargs.{name}: the chat template reads no such variable, only "
                f"{', '.join(sorted(read)) or 'none'}: leave it out"
            )


def _in_parts(message: Message) -> Message:
    """The message with a list of parts for content."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _in_one(message: Message) -> Message:
    """The message with one text for content, if all its parts are texts."""
    content = message.get("content")
    if not isinstance(content, list) or any(part["type"] != "text" for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def _leaves(tree: Tree) -> Iterator[Leaf]:
    """All values that the template should write, except those that are empty or false."""
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
        if role == "assistant" and thought_in(text):
            yield Leaf(place, before=END_THOUGHT)


def _leaves_of_calls(path: tuple[str | int, ...], calls: list[dict[str, Any]]) -> Iterator[Leaf]:
    for number, call in enumerate(calls):
        inner = (*path, number, *_function_path(call))
        yield Leaf((*inner, "name"))
        if function_of(call).get(ARGUMENTS):
            yield Leaf((*inner, ARGUMENTS))


def _function_path(tool: dict[str, Any]) -> tuple[str, ...]:
    return ("function",) if "function" in tool else ()


def _situation(chat: Chat, leaf: Leaf) -> tuple[Any, ...]:
    """Everything that may decide whether a template writes a leaf, except texts.

    In a list, only the first place is distinguished from the others.
    """
    path = tuple(min(step, 1) if isinstance(step, int) else step for step in leaf.path)
    if leaf.turn < 0:
        return path
    around = [
        chat.messages[turn]["role"] for turn in range(leaf.turn - 1, leaf.turn + 2) if 0 <= turn < len(chat.messages)
    ]
    place = (leaf.turn > chat.last_of_user, leaf.turn in chat.trained, bool(chat.tools))
    return (path, leaf.before, tuple(around), place, facts_of(chat, leaf.turn))


def _mark(number: int) -> str:
    return f"{PROBE}{number}{PROBE}"


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    """The value at a path of the tree."""
    for step in path:
        tree = tree[step]
    return tree


def _takes_mark(tree: Tree, leaf: Leaf) -> bool:
    """Whether a mark can be added to the leaf."""
    value = _at(tree, leaf.path)
    return isinstance(value, str) or (isinstance(value, dict) and leaf.path[-1] == ARGUMENTS)


def _marked(tree: Tree, marks: dict[Leaf, str]) -> Tree:
    """A copy of the tree with marks. A text gets more text, arguments get one more, and any other value becomes
    None."""
    copy: Tree = _copied(tree)
    for leaf, mark in marks.items():
        *path, key = leaf.path
        holder = _at(copy, path)
        holder[key] = _with_mark(holder[key], leaf, mark) if _takes_mark(copy, leaf) else None
    return copy


def _copied(value: Any) -> Any:
    """A copy of all objects and lists in a value; other values stay as they are."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _with_mark(value: Any, leaf: Leaf, mark: str) -> Any:
    if isinstance(value, dict):
        return {**value, mark: mark}
    head, end, tail = value.partition(leaf.before) if leaf.before else (value, "", "")
    return f"{head}{mark}{end}{tail}"


def _label(chat: Chat, leaf: Leaf) -> str:
    if leaf.turn < 0:
        return f"tools, such as {function_of(chat.tools[int(leaf.path[1])])['name']!r}"
    key = ".".join(str(step) for step in leaf.path[2:])
    what = f"what comes before {END_THOUGHT} in {key}" if leaf.before else key
    return f"{what} of turn {leaf.turn} (role {chat.messages[leaf.turn]['role']})"


def _ignore(leaf: Leaf) -> str:
    """The second remedy in an error message, which exists for everything but contents."""
    name = "tools" if leaf.turn < 0 else leaf.path[2]
    return "" if name == "content" else f", or pass it over with ignore: [{name}] of the source"
