"""Completions for the page: groups of one step, with long texts cut."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel_rl.observe.metrics import read_lines

MOST_GROUPS = 12
"""Most groups of a step that a page shows."""

MOST_CHARACTERS = 6000
"""Most characters of a text. Of a longer one the middle is left out."""


def groups_of(file: Path) -> list[dict[str, Any]]:
    """The first groups of a step: each a prompt with its completions.

    Args:
        file: a file of rollouts, one line for each completion. Those of a prompt stand together.
    """
    by_prompt = [[*group] for _, group in itertools.groupby(read_lines(file), key=lambda record: record["prompt"])]
    by_prompt.sort(key=lambda records: all("pieces" not in record for record in records))  # those with tokens first
    groups: list[dict[str, Any]] = []
    for records in by_prompt[:MOST_GROUPS]:
        completions = [_completion(record) for record in records]
        groups.append({"prompt": shortened(records[0]["prompt"]), "completions": completions})
    return groups


def _completion(record: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in record.items() if key != "prompt"}
    kept["completion"] = shortened(record["completion"])
    if len(record["completion"]) > MOST_CHARACTERS:
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
    """A text without its middle, if it is long."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Some of the steps, evenly spread, the first and the last among them.

    Args:
        steps: all steps.
        count: most steps that are wanted.
    """
    if len(steps) <= count:
        return [*steps]
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]
