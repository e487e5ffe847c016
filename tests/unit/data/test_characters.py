"""A lone surrogate, which JSON can write and no tokenizer reads, is told by file and line before a run starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import SourcesConfig
from automodel_rl.config.run import Records
from automodel_rl.data.checks import check_records
from automodel_rl.data.records import READERS
from automodel_rl.errors import InputError

BAD = "caf\udce9"
ASK, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def of_tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}} | more}


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
RECORDS: list[tuple[Records, dict[str, Any]]] = [
    ("chats", {"text": BAD}),
    ("chats", {"messages": [ASK, ANSWER | {"content": BAD}]}),
    ("chats", {"messages": [ASK | {"content": [{"type": "text", "text": BAD}]}, ANSWER]}),
    ("chats", {"messages": [ASK, ANSWER | {"reasoning_content": BAD}]}),
    ("chats", {"messages": [ASK | {"name": BAD}, ANSWER]}),
    ("chats", {"messages": [{"from": "human", "value": BAD}, {"from": "gpt", "value": "b"}]}),
    ("chats", {"messages": [ASK, calling({"x": [{"y": BAD}]})]}),
    ("chats", {"messages": [ASK, calling({BAD: 1})]}),
    ("chats", {"messages": [ASK, calling(json.dumps({"x": BAD}))]}),
    ("chats", {"messages": [ASK, ANSWER], "tools": [of_tool(description=BAD)]}),
    ("chats", {"messages": [ASK, ANSWER], "tools": json.dumps([of_tool(description=BAD)])}),
    ("chats", {"messages": [ASK, ANSWER], "system": BAD}),
    ("chats", {"prompt": "a", "completion": BAD}),
    ("pairs", PAIR | {"rejected": BAD}),
    ("ranked pairs", PAIR | {"chosen": BAD}),
    ("judged", {"prompt": BAD, "completion": "b", "label": True}),
    ("prompts", {"prompt": BAD}),
    ("prompts", {"prompt": "a", "answer": BAD}),
    ("prompts", {"prompt": "a", "info": {"hints": [BAD]}}),
]


@pytest.mark.parametrize(("reads", "record"), RECORDS, ids=map(str, range(len(RECORDS))))
def test_a_lone_surrogate_is_refused_where_records_are_read(
    reads: Records, record: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "d.jsonl"
    good = json.dumps(record).replace("\\\\udce9", "e").replace("\\udce9", "é")
    path.write_text(f"{good}\n{json.dumps(record)}\n")
    with pytest.raises(InputError, match=r"d.jsonl:2: .* has the character '\\udce9'.*lone surrogate"):
        check_records(SourcesConfig(train=(SourceConfig(path=str(path)),)), READERS[reads])


def test_records_that_may_be_left_out_are_passed_over_unless_all_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    config = SourcesConfig(train=(SourceConfig(path=str(path)),), on_bad_record="drop")
    path.write_text("".join(json.dumps({"messages": [ASK, ANSWER | {"content": c}]}) + "\n" for c in (BAD, "b", None)))
    assert [where for _, where in check_records(config, READERS["chats"])] == [f"{path}:2"]
    path.write_text(json.dumps({"text": BAD}))
    with pytest.raises(InputError, match="d.jsonl:1: "):
        check_records(config, READERS["chats"])
