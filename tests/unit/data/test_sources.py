"""Data files: records by number, mistakes by file and line."""

import json
from pathlib import Path

import pytest

from automodel_rl.config import SourceConfig
from automodel_rl.data import sources
from automodel_rl.data.records import check_records, read_chat, read_pair, read_prompt
from automodel_rl.data.sources import JsonLines, open_source
from automodel_rl.errors import InputError

CHAT = {"messages": [{"role": "user", "content": "ä?"}, {"role": "assistant", "content": "b"}]}


def test_records_are_read_by_number_over_blank_lines_and_without_a_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"n": "ä"}) + "\n\n" + json.dumps({"n": 1}))
    source = JsonLines(path)
    assert len(source) == 2
    assert [source[0]["n"], source[1]["n"]] == ["ä", 1]
    assert [record["n"] for record in source] == ["ä", 1]
    assert source.where(1) == f"{path}:3"


def test_columns_may_have_other_names() -> None:
    config = SourceConfig(path="x", columns={"messages": "chat"})
    assert read_chat({"chat": CHAT["messages"]}, config, "x") == CHAT["messages"]


def test_a_folder_is_opened_as_a_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(CHAT) + "\n" + json.dumps(CHAT) + "\n")
    config = SourceConfig(path=str(folder))
    source = open_source(config)
    assert len(source) == 2
    assert read_chat(source[1], config, "x") == CHAT["messages"]
    assert source.where(1) == f"{folder}[train]: record 1"
    check_records([config], read_chat)
    with pytest.raises(InputError, match="neither a .jsonl file nor a dataset with split 'nosplit'"):
        open_source(SourceConfig(path=str(folder), split="nosplit"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "d.jsonl: the data file is empty"),
        ("\n \n", "d.jsonl: the data file is empty"),
        (json.dumps(CHAT) + "\n{bad\n", r"d.jsonl:2: not valid JSON"),
        ("[1]\n", "d.jsonl:1: a record is a JSON object, this is list"),
        ('{"text": 1}\n', "d.jsonl:1: no column 'messages', only text"),
        ('{"messages": "hi"}\n', "d.jsonl:1: messages must be a list"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', "d.jsonl:1: no assistant turn"),
    ],
)
def test_bad_records_are_named_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        check_records([SourceConfig(path=str(path))], read_chat)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"nowhere.jsonl: cannot read the data file"):
        check_records([SourceConfig(path="nowhere.jsonl")], read_chat)


def test_texts_stand_for_messages_in_pairs_and_prompts() -> None:
    pair = read_pair({"prompt": "p", "chosen": "c", "rejected": "r"}, SourceConfig(path="x"), "x:1")
    assert pair.prompt == [{"role": "user", "content": "p"}]
    assert pair.chosen == [{"role": "assistant", "content": "c"}]
    config = SourceConfig(path="x", columns={"prompt": "question"})
    assert read_prompt({"question": "p"}, config, "x:1") == pair.prompt


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": []}, "prompt must end with a turn that the assistant can answer"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "prompt must end with a turn"),
        ({"prompt": 3}, "prompt must be a text or a list of objects"),
        ({"question": "p"}, "no column 'prompt', only question"),
    ],
)
def test_prompts_that_are_none_are_named(record: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"x:1: {message}"):
        read_prompt(record, SourceConfig(path="x"), "x:1")


def test_a_folder_with_too_many_files_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("")
    with pytest.raises(InputError, match="holds more than 3 files: give the folder"):
        open_source(SourceConfig(path=str(tmp_path)))
