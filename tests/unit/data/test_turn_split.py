"""Chats as one example for each trained turn."""

import json
from pathlib import Path

import pytest

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import DataConfig
from automodel_rl.config.load import check_config
from automodel_rl.data.records import Text, read_chat
from automodel_rl.data.turn_split import open_examples
from automodel_rl.errors import InputError


def say(role: str, content: str, **more: object) -> dict:
    return {"role": role, "content": content, **more}


CHAT = [
    say("user", "a"),
    say("assistant", "b"),
    say("user", "c"),
    say("assistant", "d", weight=0),
    say("user", "e"),
    say("assistant", "f"),
    say("user", "g"),
]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, *[{"from": "gpt", "value": "c"}]]

RECORDS = [{"messages": CHAT}, {"text": "plain"}, {"prompt": "p", "completion": "q"}, {"messages": SHAREGPT}]


def examples(folder: Path, records: list[dict], turns: str, **source: object) -> list[tuple[list, list, str]]:
    """Contents and trained turns of every example, with its place."""
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = SourceConfig.model_validate({"path": str(path), **source})
    opened = open_examples(config, DataConfig.model_validate({"train": [{"path": str(path)}], "turns": turns}))
    assert [opened[number] for number in range(len(opened))] == list(opened)
    found = []
    for number, record in enumerate(opened):
        held = read_chat(record, config, "x")
        if isinstance(held, Text):
            found.append(([held.text], [], opened.where(number)))
        else:
            found.append(([m["content"] for m in held.messages], [*held.trained], opened.where(number)))
    return found


def test_every_trained_turn_is_an_example_with_what_comes_before(tmp_path: Path) -> None:
    line = f"{tmp_path / 'data.jsonl'}:"
    assert examples(tmp_path, RECORDS, "split") == [
        (["a", "b"], [1], f"{line}1"),
        (["a", "b", "c", "d", "e", "f"], [5], f"{line}1"),
        (["plain"], [], f"{line}2"),
        (["p", "q"], [1], f"{line}3"),
        (["a", "b"], [1], f"{line}4"),
        (["a", "b", "c"], [2], f"{line}4"),
    ]
    assert [len(texts) for texts, _, _ in examples(tmp_path, RECORDS, "together")] == [7, 1, 2, 3]


def test_columns_inside_of_others_are_split_too(tmp_path: Path) -> None:
    records = [{"of": {"chat": CHAT[:2] + CHAT[4:6], "id": 3}}]
    found = examples(tmp_path, records, "split", columns={"messages": "of.chat"})
    assert [texts for texts, _, _ in found] == [["a", "b"], ["a", "b", "e", "f"]]


def test_the_last_turn_alone_cannot_be_split() -> None:
    with pytest.raises(InputError, match="turns=split trains every turn"):
        check_config(DataConfig, {"train": ["x"], "turns": "split", "train_on": "last"})
