"""Rendering of chats by a tokenizer's chat template, and detection of content that the template drops."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_rl.data.kinds import (
    ARGUMENTS,
    BEGIN_THOUGHT,
    THOUGHTS,
    TextPiece,
    facts_of,
    has_text_or_calls,
    pieces_of,
    with_json,
    with_objects,
)
from automodel_rl.data.messages import Chat, Message, function_of, media_parts
from automodel_rl.errors import InputError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Template tag that starts the assistant's text."""

PROBE = "xyzzy"
"""A text that occurs in no template."""

MARK = re.compile(f"{PROBE}([0-9]+){PROBE}")
"""A numbered mark that was added to a value of a chat."""

OTHERS = 0xE000
"""First of the private-use characters, which occur in no chat. Changed values of a turn become one each."""

QUESTION: Message = {"role": "user", "content": PROBE}

NO_ARGUMENTS = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}
"""A tool, for templates that render calls only if there are tools."""

LINKS = ("name", "tool_call_id")
"""Keys of a tool message that identify its call. The order of messages does so too."""

REMEDY = "set data.chat_template to a template that writes it, or remove it from the data"
"""Advice for content that a template drops."""

Tree = dict[str, Any]
"""`messages` and `tools` of a chat."""


@dataclass(frozen=True)
class Leaf:
    """A value in a chat that the template should render.

    Attributes:
        path: keys and indices that lead to the value in the tree.
        piece: the part of the text that the leaf is, if a thought tag follows it.
        number: index among these parts.
    """

    path: tuple[str | int, ...]
    piece: TextPiece | None = None
    number: int = 0

    @property
    def turn(self) -> int:
        """Index of the leaf's message; -1 for a tool."""
        return int(self.path[1]) if self.path[0] == "messages" else -1

    @property
    def is_thought(self) -> bool:
        return self.path[-1] in THOUGHTS if self.piece is None else self.piece.is_thought


class ChatTemplate:
    """Renders chats as text and as tokens.

    Args:
        tokenizer: a tokenizer with a chat template.
        reads: part types besides text that the model supports: "image", "video", "audio".
        variables: additional variables, all of which the template must use.

    Attributes:
        reads_parts_only: whether contents must be lists of parts.
        arguments_form: converts a message's call arguments to the form that the template renders, objects or JSON.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reads: Collection[str] = (),
        variables: Mapping[str, Any] | None = None,
    ):
        self.tokenizer, self.reads, self.variables = tokenizer, reads, dict(variables or {})
        _check_variables(self.variables, named_templates(tokenizer).values())
        self.reads_parts_only = False
        self.arguments_form: Callable[[Message], Message] = _as_given
        self.reads_parts_only = self._reads_parts_only()
        self.arguments_form = self._arguments_form()
        self._accepted: set[Any] = set()

    def has_marks(self, chat: Chat) -> bool:
        """Whether the template marks the assistant's text in a chat."""
        named = named_templates(self.tokenizer)
        name = "tool_use" if chat.tools and "tool_use" in named else "default"
        return bool(GENERATION_MARK.search(named.get(name, "")))

    def encode(self, chat: Chat, where: str, **options: Any) -> Any:
        """Renders and tokenises a chat, with further `options` of `apply_chat_template`. Returns the tokenizer's
        mapping, with `input_ids`. Raises InputError if the template refuses the chat, or the model does not support its
        media."""
        with self._written(chat, where) as (messages, tools):
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, return_dict=True, **options, **self.variables
            )

    def marked_text(self, chat: Chat, where: str) -> tuple[str, list[tuple[int, int]]]:
        """Returns the rendered text and the character spans (end exclusive) that the template marks as the assistant's.
        Same errors as `encode`."""
        with self._written(chat, where) as (messages, tools):
            texts, marked = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.variables},
            )
        return texts[0], [(int(start), int(end)) for start, end in marked[0]]

    @contextlib.contextmanager
    def _written(self, chat: Chat, where: str) -> Iterator[tuple[list[Any], list[Any] | None]]:
        """Provides messages and tools for a block in which the template renders them."""
        if self.tokenizer.chat_template is None:
            raise InputError(f"{where}: the tokenizer has no chat template for it: set one in data.chat_template")
        for kind in {part["type"] for part in media_parts(chat.messages)} - {*self.reads}:
            read = ", ".join(["text", *self.reads])
            raise InputError(f"{where}: has a part of type {kind}, but the model reads {read} only: use another model")
        tree = self._tree(chat)
        with self.refusals(where):
            yield tree["messages"], tree["tools"] or None

    @staticmethod
    @contextlib.contextmanager
    def refusals(where: str) -> Iterator[None]:
        """Converts any exception of a block that renders or tokenises a chat to an InputError with the chat's
        location."""
        try:
            yield
        except Exception as error:  # a template is a program, and may raise any error
            reason = str(error) or type(error).__name__
            raise InputError(f"{where}: the chat template refuses these messages ({reason})") from None

    def text(self, chat: Chat) -> str | None:
        """Renders a chat; None if the template raises."""
        return self._text(self._tree(chat))

    def values(self, chat: Chat, turn: int) -> list[Leaf]:
        """Returns the values of a message that can be changed: the non-empty ones, and also empty arguments."""
        tree = self._tree(chat)
        found = [leaf for leaf in _leaves(tree, with_empty_arguments=True) if leaf.turn == turn and leaf.piece is None]
        return [leaf for leaf in found if _takes_mark(tree, leaf)]

    def changed_text(self, chat: Chat, changed: Mapping[Leaf, int], add_generation_prompt: bool = False) -> str | None:
        """Renders a chat with some values replaced, each by the private-use character of its number; None if the
        template raises. `add_generation_prompt` adds the header of the assistant's next turn."""
        tree = _copied(self._tree(chat))
        for leaf, number in changed.items():
            *path, key = leaf.path
            holder, other = _at(tree, path), chr(OTHERS + number)
            holder[key] = other if isinstance(holder[key], str) else {other: other}
        return self._text(tree, add_generation_prompt)

    def text_with_generation_prompt(self, chat: Chat) -> str:
        """Renders a chat with the header of the assistant's next turn. Raises InputError if the template refuses it."""
        text = self._text(self._tree(chat), add_generation_prompt=True)
        if text is not None:
            return text
        raise InputError(f"the chat template refuses a message of {chat.messages[-1]['role']} there")

    @functools.cached_property
    def header(self) -> str:
        """Text that the template writes before an answer of the assistant, without thoughts that it may open itself;
        empty if it cannot be determined."""
        question: Tree = {"messages": [_in_parts(QUESTION) if self.reads_parts_only else QUESTION], "tools": []}
        before, asking = self._text(question), self._text(question, add_generation_prompt=True)
        if before is None or asking is None:
            return ""
        place = num_common(before, asking)
        if place < len(before):  # the chat's end, such as an end token, is where the answer would begin
            begin, starts = asking.rfind(PROBE), asking.startswith
            places = (at for at in range(place, begin, -1) if any(starts(mark, at) for mark in self.special_tokens))
            place = next(places, len(asking))
        return asking[place:].partition(BEGIN_THOUGHT)[0]

    @functools.cached_property
    def has_no_turn_header(self) -> bool:
        """Whether the template writes nothing between a question and its answer, so that there is no header."""
        form = _in_parts if self.reads_parts_only else _in_one
        question, answer = form(QUESTION), form({"role": "assistant", "content": PROBE})
        asking = self._text({"messages": [question], "tools": []}, add_generation_prompt=True)
        text = self._text({"messages": [question, answer], "tools": []})
        if asking is None or text is None or not text.startswith(asking):
            return False
        return text[len(asking) :].lstrip().startswith(PROBE)

    @functools.cached_property
    def has_no_end_token(self) -> bool:
        """Whether the template writes nothing after an answer, so that it ends only with the role mark of the next
        message."""
        form = _in_parts if self.reads_parts_only else _in_one
        messages = [form(QUESTION), form({"role": "assistant", "content": PROBE})]
        text = self._text({"messages": messages, "tools": []})
        return text is not None and PROBE in text and not text.rpartition(PROBE)[2].strip()

    @functools.cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The tokenizer's special tokens, including added ones."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple({*added, *self.tokenizer.all_special_tokens})

    def check(self, chat: Chat, where: str, add_generation_prompt: bool = False) -> None:
        """Raises InputError if the template drops a part of a chat that it can `encode`.

        All leaves get a mark, and the chat is rendered. Each leaf whose mark is missing in the result is then changed
        alone: if the result changes, the template uses the leaf. As this renders the chat again for each such leaf, it
        is done only once for all leaves in the same situation.
        """
        tree = self._tree(chat)
        self._check_empty(tree, chat, where, add_generation_prompt)
        leaves = [*_leaves(tree)]
        marks = {leaf: _mark(number) for number, leaf in enumerate(leaves) if _takes_mark(tree, leaf)}
        text = self._text(_marked(tree, marks), add_generation_prompt) or ""
        found = {int(number) for number in MARK.findall(text)}
        for leaf in (leaf for number, leaf in enumerate(leaves) if number not in found):
            situation = (_situation(chat, leaf), add_generation_prompt)
            if situation in self._accepted:
                continue
            if not (self._may_forget(chat, leaf) or self._reads(tree, leaf, add_generation_prompt)):
                raise InputError(f"{where}: the chat template omits {_label(tree, leaf)}: {REMEDY}{_ignore(leaf)}")
            self._accepted.add(situation)

    def _check_empty(self, tree: Tree, chat: Chat, where: str, add_generation_prompt: bool) -> None:
        """Raises InputError if the template writes something for an empty content, such as None.

        Such text disappears once the content has a text.
        """
        for leaf in _empty_contents(tree):
            situation = ("empty", _situation(chat, leaf), add_generation_prompt)
            if situation in self._accepted:
                continue
            text = self._text(tree, add_generation_prompt)
            filled = self._text(_marked(tree, {leaf: PROBE}), add_generation_prompt)
            first, end = (text and filled and changed_part(text, filled)) or (0, 0)
            if stands_in := (text or "")[first:end].strip():
                raise InputError(
                    f"{where}: the chat template writes {stands_in!r:.60} for the empty content of turn {leaf.turn}: "
                    "set data.chat_template to a template that writes nothing there, or remove the turn"
                )
            self._accepted.add(situation)

    def _may_forget(self, chat: Chat, leaf: Leaf) -> bool:
        """Whether a template may drop a leaf: a thought in a turn before the user's last message.

        If the turn is trained, it must also have a text or a call besides the thought, and the template must render the
        thought when the chat ends with that turn.
        """
        if not leaf.is_thought or leaf.turn not in chat.turns or leaf.turn > chat.last_of_user:
            return False
        if leaf.turn not in chat.trained:
            return True
        return has_text_or_calls(chat.messages[leaf.turn]) and self._reads(self._tree(chat.until(leaf.turn + 1)), leaf)

    def _reads(self, tree: Tree, leaf: Leaf, add_generation_prompt: bool = False) -> bool:
        """Whether the rendered text changes when only this leaf is changed."""
        changed = self._text(_marked(tree, {leaf: PROBE}), add_generation_prompt)
        # A template that raises has used the value.
        return changed is None or changed != self._text(tree, add_generation_prompt)

    def _text(self, tree: Tree, add_generation_prompt: bool = False) -> str | None:
        """Renders a tree; None if the template raises."""
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
        """Whether contents must be lists of parts, as for some models with images."""
        roles = ("user", "assistant")
        texts = [{"role": role, "content": PROBE} for role in roles]
        num_texts, num_parts = (
            (self._text({"messages": messages, "tools": []}) or "").count(PROBE)
            for messages in (texts, [_in_parts(message) for message in texts])
        )
        return num_texts < len(roles) <= num_parts

    def _arguments_form(self) -> Callable[[Message], Message]:
        """Determines the form of arguments that the template renders as a model would write them. It may render JSON as
        a quoted string, and may raise for objects."""
        by_object, by_json = (
            self._text({"messages": [QUESTION, _calling(arguments)], "tools": [NO_ARGUMENTS]})
            for arguments in ({PROBE: PROBE}, json.dumps({PROBE: PROBE}))
        )
        if f'\\"{PROBE}' in (by_json or ""):
            return with_objects
        return with_json if by_object is None and by_json is not None else _as_given

    def _tree(self, chat: Chat) -> Tree:
        """Converts a chat to the form that the template takes."""
        form = _in_parts if self.reads_parts_only else _in_one
        messages = [form({k: v for k, v in message.items() if k != "weight"}) for message in chat.messages]
        return {"messages": [self.arguments_form(message) for message in messages], "tools": list(chat.tools)}


def named_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns a tokenizer's chat templates by name. A single one is named default."""
    templates = tokenizer.chat_template
    return dict(templates) if isinstance(templates, Mapping) else {"default": str(templates or "")}


def _as_given(message: Message) -> Message:
    return message


def _calling(arguments: Any) -> Message:
    """Returns a turn that calls a tool."""
    call = {"id": "123456789", "type": "function", "function": {"name": PROBE, ARGUMENTS: arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _check_variables(variables: Mapping[str, Any], templates: Iterable[str]) -> None:
    """Raises InputError for a variable that no template uses, or that is set for every chat anyway."""
    if not variables:
        return
    plain = [re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", text) for text in templates]  # transformers' own tag
    jinja = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        read = {name for text in plain for name in meta.find_undeclared_variables(jinja.parse(text))}
    except TemplateSyntaxError as error:
        raise InputError(
            f"the chat template is not valid Jinja ({error}): set another one in data.chat_template"
        ) from None
    read -= {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
    for name in variables:
        if name not in read:
            raise InputError(
                f"data.chat_template_kwargs.{name}: the chat template does not read this variable, only "
                f"{', '.join(sorted(read)) or 'none'}: remove it"
            )


def _in_parts(message: Message) -> Message:
    """Converts a text content to a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _in_one(message: Message) -> Message:
    """Converts a content of text parts to one text."""
    content = message.get("content")
    if not isinstance(content, list) or any(part["type"] != "text" for part in content):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values without content. False and 0 are not among them: they are meaningful."""


def _leaves(tree: Tree, with_empty_arguments: bool = False) -> Iterator[Leaf]:
    """Yields all non-empty values that the template should render."""
    for number, tool in enumerate(tree["tools"]):
        yield Leaf(("tools", number, *_function_path(tool), "name"))
    for turn, message in enumerate(tree["messages"]):
        skipped = ("role", *LINKS) if message["role"] == "tool" else ("role",)
        for key, value in message.items():
            if key in skipped or value in EMPTY:
                continue
            path = ("messages", turn, key)
            if key == "content":
                yield from _leaves_of_content(path, value)
            elif key == "tool_calls":
                yield from _leaves_of_calls(path, value, with_empty_arguments)
            else:
                yield Leaf(path)


def _leaves_of_content(path: tuple[str | int, ...], content: Any) -> Iterator[Leaf]:
    texts = {path: content} if isinstance(content, str) else {
        (*path, place, "text"): part["text"] for place, part in enumerate(content) if part.get("text")
    }  # fmt: skip
    for place, text in texts.items():
        yield Leaf(place)
        yield from (Leaf(place, piece, number) for number, piece in enumerate(pieces_of(text)))


def _leaves_of_calls(
    path: tuple[str | int, ...], calls: list[dict[str, Any]], with_empty_arguments: bool
) -> Iterator[Leaf]:
    for number, call in enumerate(calls):
        inner = (*path, number, *_function_path(call))
        yield Leaf((*inner, "name"))
        arguments = function_of(call).get(ARGUMENTS)
        if arguments or (with_empty_arguments and arguments is not None):
            yield Leaf((*inner, ARGUMENTS))


def _empty_contents(tree: Tree) -> Iterator[Leaf]:
    """Yields contents that are an empty text."""
    for turn, message in enumerate(tree["messages"]):
        content = message.get("content")
        if content == "":
            yield Leaf(("messages", turn, "content"))
        elif isinstance(content, list) and [part.get("text") for part in content] == [""]:
            yield Leaf(("messages", turn, "content", 0, "text"))


def changed_part(text: str, changed: str) -> tuple[int, int] | None:
    """Returns the span (end exclusive) of a text that differs from a changed one; None if they are equal."""
    if changed == text:
        return None
    first = num_common(text, changed)
    return first, len(text) - num_common(text[first:][::-1], changed[first:][::-1])


def num_common(one: str, other: str) -> int:
    """Returns the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _function_path(tool: dict[str, Any]) -> tuple[str, ...]:
    return ("function",) if "function" in tool else ()


def _situation(chat: Chat, leaf: Leaf) -> tuple[Any, ...]:
    """Returns everything that may decide whether a template renders a leaf, except texts.

    In a list, only the first item is distinguished from the others.
    """
    path = tuple(min(step, 1) if isinstance(step, int) else step for step in leaf.path)
    if leaf.turn < 0:
        return path
    around = [
        chat.messages[turn]["role"] for turn in range(leaf.turn - 1, leaf.turn + 2) if 0 <= turn < len(chat.messages)
    ]
    place = (leaf.turn > chat.last_of_user, leaf.turn in chat.trained, bool(chat.tools))
    part = leaf.piece and (leaf.number, leaf.is_thought)
    return (path, part, tuple(around), place, facts_of(chat, leaf.turn))


def _mark(number: int) -> str:
    return f"{PROBE}{number}{PROBE}"


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    """Returns the value at a path of the tree."""
    for step in path:
        tree = tree[step]
    return tree


def _takes_mark(tree: Tree, leaf: Leaf) -> bool:
    """Whether a mark can be added to the leaf."""
    value = _at(tree, leaf.path)
    return isinstance(value, str) or (isinstance(value, dict) and leaf.path[-1] == ARGUMENTS)


def _marked(tree: Tree, marks: dict[Leaf, str]) -> Tree:
    """Returns a copy of the tree with marks. Texts are extended, arguments get one more entry, and any other value
    becomes None."""
    copy: Tree = _copied(tree)
    # The last piece of a text comes first, because marks shift the text after them.
    for leaf, mark in sorted(marks.items(), key=lambda item: (item[0].piece is not None, -item[0].number)):
        *path, key = leaf.path
        holder = _at(copy, path)
        holder[key] = _with_mark(holder[key], leaf, mark) if _takes_mark(copy, leaf) else None
    return copy


def _copied(value: Any) -> Any:
    """Copies all objects and lists in a value."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _with_mark(value: Any, leaf: Leaf, mark: str) -> Any:
    if isinstance(value, dict):
        return {**value, mark: mark}
    end = len(value) if leaf.piece is None else leaf.piece.end
    return f"{value[:end]}{mark}{value[end:]}"


def _label(tree: Tree, leaf: Leaf) -> str:
    if leaf.turn < 0:
        return f"tools, such as {function_of(_at(tree, leaf.path[:2]))['name']!r}"
    what = ".".join(str(step) for step in leaf.path[2:])
    if leaf.piece is not None:
        text = _at(tree, leaf.path)[leaf.piece.start : leaf.piece.end].strip()
        what = f"what comes before {leaf.piece.mark} in {what}" if leaf.is_thought else f"{text!r:.60} in {what}"
    return f"{what} of turn {leaf.turn} (role {tree['messages'][leaf.turn]['role']})"


def _ignore(leaf: Leaf) -> str:
    """Returns additional advice for an error message, available for everything but contents."""
    name = "tools" if leaf.turn < 0 else leaf.path[2]
    return "" if name == "content" else f", or skip it with ignore: [{name}] of the source"
