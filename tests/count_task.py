"""A task that needs its tool: only the tool knows how many things somebody has. It is learned in a minute."""

import json
import random
from pathlib import Path
from typing import Any

from automodel_rl.quickstart.model import call_text, train_tokenizer, write_model
from automodel_rl.rollout.episodes.adapters import from_trl

OWNERS = ("Ann", "Ben", "Cem", "Dora", "Eve", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "dogs", "eggs", "forks")
CALLED = 0.4
"""Share of warm-up chats that call the tool. The others guess."""

SCHEMA = {"type": "function", "function": {"name": "count"}}


class Count:
    """An environment in the manner of TRL."""

    def reset(self, owner: str, thing: str, answer: str, **_: Any) -> None:
        self.counts = {(owner, thing): answer}

    def count(self, owner: str, thing: str) -> str:
        """Counts things.

        Args:
            owner: The person who has them.
            thing: The kind of thing.
        """
        return self.counts.get((owner, thing), "0")


make = from_trl(Count)


def write_task(folder: Path, num_chats: int, num_prompts: int) -> None:
    """A model with random weights, chats for its warm-up, and prompts."""
    random_ = random.Random(0)
    drawn = [
        (random_.choice(OWNERS), random_.choice(THINGS), str(random_.randint(1, 9)))
        for _ in range(num_chats + num_prompts)
    ]
    chats = [_chat(random_, *one) for one in drawn[:num_chats]]
    prompts = [
        {"prompt": [_question(owner, thing)], "owner": owner, "thing": thing, "answer": answer}
        for owner, thing, answer in drawn[num_chats:]
    ]
    for name, rows in (("chats", chats), ("prompts", prompts[100:]), ("held_out", prompts[:100])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = [_question(owner, thing)["content"] for owner in OWNERS for thing in THINGS]
    texts += [call_text("count", {"owner": owner, "thing": thing}) for owner in OWNERS for thing in THINGS]
    write_model(folder / "model", train_tokenizer(texts * 20, 400), 0)


def _question(owner: str, thing: str) -> dict[str, str]:
    return {"role": "user", "content": f"How many {thing} does {owner} have?"}


def _chat(random_: random.Random, owner: str, thing: str, answer: str) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [_question(owner, thing)]
    if random_.random() < CALLED:
        call = {"name": "count", "arguments": {"owner": owner, "thing": thing}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "count", "content": answer},
            {"role": "assistant", "content": f"The answer is {answer}."},
        ]
    else:
        messages.append({"role": "assistant", "content": f"Perhaps {random_.randint(1, 9)}."})
    return {"messages": messages, "tools": [SCHEMA]}
