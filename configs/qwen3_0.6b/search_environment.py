"""An environment that answers searches in a record's documents. Its reward is 1 if the last turn has the answer."""

import re
from collections.abc import Sequence
from typing import Any

from automodel_rl.rollout.episodes.protocol import Message, Outcome, Turn

MAX_FOUND = 3


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


class Search:
    def __init__(self, example: dict[str, Any]):
        self.documents, self.answer = example["documents"], str(example["answer"])

    def reset(self) -> Sequence[Message]:
        return ()

    def step(self, turn: Turn) -> Outcome:
        if not turn.calls:
            return Outcome(done=True, reward=float(words(self.answer) <= words(turn.content or turn.text)))
        found = [self.search(str(dict(call["arguments"]).get("query", ""))) for call in turn.calls]
        messages = [{"role": "tool", "name": "search", "content": "\n\n".join(texts) or "nothing"} for texts in found]
        return Outcome(messages, metrics={"found": float(sum(map(len, found)))})

    def close(self) -> None: ...

    def search(self, query: str) -> list[str]:
        """The documents that share most words with a query."""
        shared = [(len(words(query) & words(text)), text) for text in self.documents]
        return [text for count, text in sorted(shared, key=lambda pair: -pair[0])[:MAX_FOUND] if count]


def make(example: dict[str, Any], seed: int) -> Search:
    return Search(example)


make.tools = [  # type: ignore[attr-defined]
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches documents.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "Words to look for."}},
                "required": ["query"],
            },
        },
    }
]
