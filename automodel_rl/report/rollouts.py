"""Completions for the page: groups of one step, with long texts shortened."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel_rl.observe.metrics import read_lines

MAX_GROUPS = 12
"""Maximum number of a step's groups on a page."""

MAX_CHARACTERS = 6000
"""Maximum length of a text. Longer texts lose their middle."""


def groups_of(file: Path) -> list[dict[str, Any]]:
    """Returns groups of a step, each a prompt with its completions: those with tokens first, and among these the ones
    whose rewards differ. In the file, completions of a prompt are adjacent."""
    by_prompt = [[*group] for _, group in itertools.groupby(read_lines(file), key=lambda record: record["prompt"])]
    by_prompt.sort(
        key=lambda records: (
            all("pieces" not in record for record in records),
            len({record.get("reward") for record in records}) == 1,
        )
    )
    groups: list[dict[str, Any]] = []
    for records in by_prompt[:MAX_GROUPS]:
        completions = [_completion(record) for record in records]
        groups.append({"prompt": shortened(records[0]["prompt"]), "completions": completions})
    return groups


def _completion(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in record.items() if key != "prompt"}
    kept["completion"] = shortened(record["completion"])
    if len(record["completion"]) > MAX_CHARACTERS:
        kept.pop("pieces", None)
    if "messages" in record:
        kept["messages"] = _shortened_messages(record["messages"])
    if "tree" in record:
        kept["tree"] = [{**turn, "messages": _shortened_messages(turn["messages"])} for turn in record["tree"]]
    return kept


def _shortened_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages]
    texts = [shortened(content) if isinstance(content, str) else "" for content in contents]
    return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]


def shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Picks at most `count` evenly spread steps, including the first and last."""
    if len(steps) <= count:
        return [*steps]
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]
