"""Codecs that read and write turns for the tools that agents send, one for each list of tools."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from automodel_rl.chat_api.exchange import ChatAnswer, ToolCall
from automodel_rl.data.template import ChatTemplate
from automodel_rl.data.tool_formats import PROBE_TOOL, Format, find_format
from automodel_rl.errors import InputError
from automodel_rl.rollout.agents.sameness import tools_digest
from automodel_rl.rollout.episodes.chat_turns import ChatTurns
from automodel_rl.rollout.episodes.protocol import Turn

MAX_KEPT = 256
"""Most codecs kept."""


class ChatCodecs:
    """Creates and caches codecs. May be called from several threads.

    Attributes:
        stop_ids: tokens with which the chat template ends turns, with calls or without.
        no_tools: why the chat template cannot write tool calls; empty if it can.
    """

    def __init__(self, template: ChatTemplate):
        self.template, self.no_tools = template, ""
        self._kept: OrderedDict[str, ChatTurns] = OrderedDict()
        self._lock = threading.Lock()
        self._form: Format | None = None
        try:
            self._form = find_format(template)
            self.stop_ids = self._turns((PROBE_TOOL,)).stop_ids
        except InputError as error:
            self._form, self.no_tools = None, str(error)
            self.stop_ids = self._turns(()).stop_ids

    def of(self, tools: Sequence[dict[str, Any]]) -> tuple[str, ChatTurns]:
        """Returns the digest of tools (JSON schemas), and their codec. Raises InputError if the template cannot write
        calls."""
        if tools and self.no_tools:
            raise InputError(f"tools: {self.no_tools}")
        digest = tools_digest(tools)
        with self._lock:
            found = self._kept.get(digest)
        codec = found or self._turns(tools)
        with self._lock:
            self._kept[digest] = codec
            self._kept.move_to_end(digest)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return digest, codec

    def _turns(self, tools: Sequence[dict[str, Any]]) -> ChatTurns:
        return ChatTurns(self.template, tools, self._form, what="the request")


def answer_of(
    turn: Turn,
    name: str,
    model: str,
    stop: Sequence[str],
    num_prompt: int,
    num_written: int,
    extras: Mapping[str, Any] | None = None,
    *,
    is_parallel: bool = True,
) -> ChatAnswer:
    """Converts a turn to an answer. One with a malformed call is a text.

    Args:
        name: id of the answer.
        stop: the client's stop texts; the content ends before the first of them.
        num_prompt, num_written: tokens of prompt and turn.
        is_parallel: the client accepts several calls; otherwise it gets the first.
    """
    content, calls = (turn.text, ()) if turn.problem else (turn.content, turn.calls)
    calls = calls if is_parallel else calls[:1]
    completed = {turn.text.find(text) + len(text): text for text in stop if text in turn.text}
    matched = completed[min(completed)] if completed else ""
    ends = [content.find(text) for text in stop if text in content]
    return ChatAnswer(
        name,
        model,
        content[: min(ends, default=len(content))],
        "" if turn.problem else turn.reasoning,
        tuple(ToolCall(f"call_{name}_{place}", c["name"], c["arguments"]) for place, c in enumerate(calls)),
        turn.is_truncated,
        num_prompt,
        num_written,
        extras or {},
        matched,
    )
