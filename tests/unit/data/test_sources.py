"""Data files: records by number, mistakes by file and line."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import SourcesConfig
from automodel_rl.data import sources
from automodel_rl.data.checks import check_records
from automodel_rl.data.json_files import JsonLines
from automodel_rl.data.kinds import kind_of
from automodel_rl.data.messages import Chat
from automodel_rl.data.records import Reader, chats_of, read_chat, read_example, read_pair, read_prompt
from automodel_rl.data.sources import open_source
from automodel_rl.errors import InputError

CHAT = {"messages": [{"role": "user", "content": "ä?"}, {"role": "assistant", "content": "b"}]}


def test_records_are_read_by_number_over_blank_lines_and_without_a_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"n": "ä"}) + "\n\n" + json.dumps({"n": 1}))
    source = JsonLines(path, path)
    assert len(source) == 2
    assert [source[0]["n"], source[1]["n"]] == ["ä", 1]
    assert [record["n"] for record in source] == ["ä", 1]
    assert source.where(1) == f"{path}:3"


def test_columns_may_have_other_names() -> None:
    config = SourceConfig(path="x", columns={"messages": "chat"})
    assert read_chat({"chat": CHAT["messages"]}, config, "x").messages == CHAT["messages"]


def test_a_folder_is_opened_as_a_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(CHAT) + "\n" + json.dumps(CHAT) + "\n")
    config = SourceConfig(path=str(folder))
    source = open_source(config)
    assert len(source) == 2
    assert read_chat(source[1], config, "x").messages == CHAT["messages"]
    assert source.where(1) == f"{folder}[train]: record 1"
    check_records(SourcesConfig(train=(config,)), read_chat)
    with pytest.raises(InputError, match="neither a data file nor a dataset with this split"):
        open_source(SourceConfig(path=str(folder), split="nosplit"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "d.jsonl: the data file is empty"),
        ("\n \n", "d.jsonl: the data file is empty"),
        (json.dumps(CHAT) + "\n{bad\n", r"d.jsonl:2: not valid JSON"),
        ("[1]\n", "d.jsonl: record 0: a record must be a JSON object with columns, not int"),
        ("[]", "d.jsonl: the data file is empty"),
        ("3\n", "d.jsonl:1: a record must be a JSON object with columns, not int"),
        ('{"chat": 1}\n', "d.jsonl:1: no column 'messages', no 'prompt' with 'completion' and no 'text', only chat"),
        ('{"text": 1}\n', "d.jsonl:1: text must be a non-empty string"),
        ('{"messages": "hi"}\n', "d.jsonl:1: messages must be a list"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', "d.jsonl:1: no assistant turn"),
    ],
)
def test_bad_records_are_named_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        check_records(SourcesConfig(train=(SourceConfig(path=str(path)),)), read_chat)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"nowhere.jsonl: cannot read the data file"):
        check_records(SourcesConfig(train=(SourceConfig(path="nowhere.jsonl"),)), read_chat)


def test_texts_stand_for_messages_in_pairs_and_prompts() -> None:
    pair = read_pair({"prompt": "p", "chosen": "c", "rejected": "r"}, SourceConfig(path="x"), "x:1")
    prompt, chosen = {"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}
    assert pair.chosen == Chat([prompt, chosen], start=1)
    config = SourceConfig(path="x", columns={"prompt": "question"})
    assert read_prompt({"question": "p"}, config, "x:1") == Chat([prompt], start=1)


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


def test_a_folder_with_too_many_files_or_folders_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILES", 3)
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}.txt").write_text("")
    with pytest.raises(InputError, match="holds more than 3 files: set a pattern for its data files"):
        open_source(SourceConfig(path=str(tmp_path)))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
RECORDS: dict[Reader, dict] = {
    read_chat: CHAT,
    read_pair: {"prompt": "p", "chosen": "c", "rejected": "r"},
    read_prompt: {"prompt": "p"},
}


@pytest.mark.parametrize("read", RECORDS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]]], ids=["list", "json", "bare"])
def test_tools_of_a_record_belong_to_its_chats(read: Reader, tools: object) -> None:
    expected = (TOOL["function"],) if tools == [TOOL["function"]] else (TOOL,)
    for name, columns in (("tools", {}), ("functions", {"tools": "functions"})):
        chats = chats_of(read({**RECORDS[read], name: tools}, SourceConfig(path="x", columns=columns), "x:1"), "x:1")
        assert [chat.tools for chat, _ in chats] == [expected] * len(chats)


@pytest.mark.parametrize("tools", [None, "", [], "null", "[]"])
def test_no_tools_are_none(tools: object) -> None:
    assert read_chat({**CHAT, "tools": tools}, SourceConfig(path="x"), "x:1").tools == ()


@pytest.mark.parametrize("read", RECORDS, ids=lambda read: read.__name__)
@pytest.mark.parametrize("tools", [["calculator"], "calculator", {"name": "f"}, [{"function": "f"}], 3])
def test_tools_that_are_no_schemas_are_refused(read: Reader, tools: object) -> None:
    with pytest.raises(InputError, match="x:1: tools .*JSON schemas"):
        read({**RECORDS[read], "tools": tools}, SourceConfig(path="x"), "x:1")


ANSWER, QUESTION = CHAT["messages"][1], CHAT["messages"][0]


def test_turns_of_weight_0_and_those_of_a_prompt_are_not_trained() -> None:
    messages = [QUESTION, ANSWER | {"weight": 0}, QUESTION | {"weight": 0}, ANSWER | {"weight": 1}, QUESTION, ANSWER]
    assert read_chat({"messages": messages}, SourceConfig(path="x"), "x:1").trained == [3, 5]
    pair = read_pair({"prompt": messages[:3], "chosen": messages[3:], "rejected": "r"}, SourceConfig(path="x"), "x:1")
    assert (pair.chosen.trained, pair.rejected.trained) == ([3, 5], [3])
    assert read_prompt({"prompt": messages[:3]}, SourceConfig(path="x"), "x:1").trained == []


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([QUESTION, ANSWER | {"weight": 0}], "all turns of the assistant have weight 0"),
        ([QUESTION, ANSWER | {"weight": 0.5}], "weight of turn 1 is 0.5: use 0 .not trained. or 1"),
        ([QUESTION, ANSWER | {"weight": True}], "weight of turn 1 is True"),
        ([QUESTION, ANSWER | {"weight": "0"}], "weight of turn 1 is '0'"),
        ([QUESTION | {"weight": 1}, ANSWER], "weight of turn 0 is 1, but turns of role user are never trained"),
        ([QUESTION, ANSWER | {"tool_calls": [{"id": 1}]}], "tool_calls of turn 1 must be a list of objects"),
        ([QUESTION, ANSWER | {"tool_calls": "f()"}], "tool_calls of turn 1 must be a list of objects"),
        ([QUESTION | {"content": [{"type": "text", "text": 3}]}, ANSWER], "a part of type text has 3 for text"),
        ([QUESTION | {"content": [{"type": "sound"}]}, ANSWER], "a part of content has type 'sound'"),
    ],
)
def test_messages_that_are_none_are_refused_in_all_kinds_of_records(messages: list[dict], message: str) -> None:
    with pytest.raises(InputError, match=f"x:1.*: {message}"):
        read_chat({"messages": messages}, SourceConfig(path="x"), "x:1")
    record = {"prompt": messages[:1], "chosen": messages[1:], "rejected": "r"}
    with pytest.raises(InputError, match=f"x:1.*: {message.replace('turn 1', 'turn 0')}"):
        read_pair(record, SourceConfig(path="x"), "x:1")


def test_keys_that_are_null_are_not_there() -> None:
    message = ANSWER | {"tool_calls": None, "weight": None, "reasoning_content": None}
    assert read_chat({"messages": [message]}, SourceConfig(path="x"), "x:1").messages == [ANSWER]


def test_nulls_that_a_dataset_fills_in_are_not_there_at_any_depth(tmp_path: Path) -> None:
    """The structs of a column share one schema, so every call has the arguments of all, and every tool."""
    functions = [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "search", "arguments": {"query": [None]}}]
    calls = [{"type": "function", "function": function} for function in functions]
    places = [{"city": {"type": "string"}}, {"query": {"type": "array"}}]
    tools = [{"name": f["name"], "parameters": {"properties": p}} for f, p in zip(functions, places, strict=True)]
    parts = [{"type": "text", "text": "b"}, {"type": "image", "path": "picture.png"}]
    called = {"role": "assistant", "content": parts[:1], "tool_calls": calls}
    record = {"messages": [called], "tools": tools}
    other = {"messages": [{"role": "user", "content": parts}], "tools": []}
    Dataset.from_list([record, other]).to_parquet(tmp_path / "train.parquet")
    config = SourceConfig(path=str(tmp_path))
    chat = read_chat(open_source(config)[0], config, "x:1")
    assert open_source(config)[0]["tools"][0]["parameters"]["properties"]["query"] is None
    assert chat.messages == [called]
    assert [*chat.tools] == tools


def test_nulls_in_json_text_stay() -> None:
    schema = json.dumps([{"name": "f", "parameters": {"default": None}}])
    call = {"function": {"name": "f", "arguments": '{"city": null}'}}
    chat = read_chat({"messages": [{**ANSWER, "tool_calls": [call]}], "tools": schema}, SourceConfig(path="x"), "x:1")
    assert chat.tools == ({"name": "f", "parameters": {"default": None}},)
    assert chat.messages[0]["tool_calls"] == [call]


def test_a_column_that_no_record_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(CHAT) + "\n" + json.dumps(CHAT | {"functions": [TOOL]}) + "\n")
    check_records(SourcesConfig(train=(SourceConfig(path=str(path), columns={"tools": "functions"}),)), read_chat)
    with pytest.raises(InputError, match="d.jsonl: no record has the column 'function', which columns name"):
        check_records(SourcesConfig(train=(SourceConfig(path=str(path), columns={"tools": "function"}),)), read_chat)


def test_of_every_kind_of_chat_the_first_is_told(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    odd = {"messages": [QUESTION, ANSWER | {"reasoning_content": "a"}]}
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in (CHAT, CHAT, odd, CHAT, odd, CHAT | {"tools": [TOOL]}))
    )
    found = check_records(SourcesConfig(train=(SourceConfig(path=str(path)),)), read_chat)
    assert [where for _, where in found] == [f"{path}:1", f"{path}:3", f"{path}:6"]


def test_a_late_record_with_another_order_of_roles_is_of_a_kind_of_its_own(tmp_path: Path) -> None:
    """A template may refuse two questions in a row, and would do so in the middle of a run."""
    path = tmp_path / "d.jsonl"
    twice, first = {"messages": [QUESTION, QUESTION, ANSWER]}, {"messages": [ANSWER, QUESTION, ANSWER]}
    longer = {"messages": [QUESTION, ANSWER, QUESTION, ANSWER, QUESTION, ANSWER]}
    path.write_text("".join(json.dumps(record) + "\n" for record in (CHAT, longer, CHAT, longer, twice, first, twice)))
    found = check_records(SourcesConfig(train=(SourceConfig(path=str(path)),)), read_chat)
    assert [where for _, where in found] == [f"{path}:{line}" for line in (1, 2, 5, 6)]


THOUGHT = ANSWER | {"reasoning_content": "a"}
SAID = ANSWER | {"content": "<think>a</think>b"}
TEXT, PICTURE = {"type": "text", "text": "b"}, {"type": "image", "path": "p.png"}


def calls(*functions: dict) -> dict:
    return {"tool_calls": [*functions]}


@pytest.mark.parametrize(
    ("messages", "others"),
    [
        ([QUESTION, ANSWER], [QUESTION, SAID]),
        ([QUESTION, ANSWER], [QUESTION, ANSWER | {"content": [TEXT]}]),
        ([QUESTION, ANSWER | {"content": [TEXT]}], [QUESTION, ANSWER | {"content": [TEXT | {"text": "a</think>b"}]}]),
        ([QUESTION | {"content": [TEXT]}, ANSWER], [QUESTION | {"content": [TEXT, PICTURE]}, ANSWER]),
        ([QUESTION, ANSWER, QUESTION, SAID], [QUESTION, SAID, QUESTION, ANSWER]),
        ([QUESTION, ANSWER, QUESTION, THOUGHT], [QUESTION, THOUGHT, QUESTION, ANSWER]),
        ([QUESTION, THOUGHT, QUESTION, ANSWER | {"weight": 0}], [QUESTION, THOUGHT | {"weight": 0}, QUESTION, ANSWER]),
        ([QUESTION, SAID, QUESTION, SAID], [QUESTION, ANSWER | {"content": "a</think>"}, QUESTION, SAID]),
        ([QUESTION, SAID], [QUESTION, ANSWER | {"content": "<think>a</think>b</think>c"}]),
        ([QUESTION, SAID], [QUESTION, ANSWER | {"content": "a<think>a</think>b"}]),
        ([QUESTION, THOUGHT, QUESTION, ANSWER], [QUESTION, THOUGHT | {"content": ""}, QUESTION, ANSWER]),
        ([ANSWER | calls({"name": "f"})], [ANSWER | calls({"name": "f", "arguments": {"a": 1}})]),
        ([ANSWER | calls({"name": "f", "arguments": "{}"})], [ANSWER | calls({"name": "f", "arguments": {"a": 1}})]),
        ([ANSWER | calls({"name": "f"})], [ANSWER | calls({"function": {"name": "f"}})]),
        ([ANSWER | calls({"name": "f"})], [ANSWER | calls({"name": "f"}, {"name": "f"})]),
    ],
)  # fmt: skip
def test_chats_that_a_template_may_treat_otherwise_are_of_two_kinds(messages: list[dict], others: list[dict]) -> None:
    assert kind_of(Chat(messages)) != kind_of(Chat(others))


def test_chats_that_differ_in_texts_and_lengths_are_of_one_kind() -> None:
    exchange = [QUESTION, SAID, QUESTION, ANSWER | calls({"name": "f", "arguments": {"a": 1}})]
    other = [QUESTION | {"content": "c"}, SAID, QUESTION, ANSWER | calls({"name": "g", "arguments": {"b": 2}})]
    assert kind_of(Chat(exchange * 2)) == kind_of(Chat([*exchange, *other]))


def test_a_thought_in_a_content_is_told_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(CHAT) + "\n" + json.dumps({"messages": [QUESTION, SAID]}) + "\n")
    assert [where for _, where in check_records(SourcesConfig(train=(SourceConfig(path=str(path)),)), read_chat)] == [
        f"{path}:1",
        f"{path}:2",
    ]


STAMPED = [message | {"id": 1, "timestamp": "now"} for message in CHAT["messages"]]
STAMPED_RECORDS: dict[Reader, dict] = {
    read_chat: {"messages": STAMPED},
    read_pair: {"prompt": STAMPED[:1], "chosen": STAMPED[1:], "rejected": "r"},
    read_prompt: {"prompt": STAMPED[:1]},
}


@pytest.mark.parametrize("read", RECORDS, ids=lambda read: read.__name__)
def test_keys_and_columns_that_a_source_ignores_are_passed_over(read: Reader, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(STAMPED_RECORDS[read] | {"tools": ["search", "calc"], "images": ["p.png"]}) + "\n")
    config = SourceConfig(path=str(path), ignore=("id", "timestamp", "tools", "images"))
    for chat, _ in check_records(SourcesConfig(train=(config,)), read):
        assert chat.tools == ()
        assert chat.messages[0] == QUESTION
    with pytest.raises(InputError, match=r"or skip it with ignore: \[tools\]"):
        check_records(SourcesConfig(train=(SourceConfig(path=str(path), ignore=("images",)),)), read)


def test_images_that_no_part_shows_may_be_ignored() -> None:
    with pytest.raises(InputError, match=r"more images than parts .* or skip them with ignore: \[images\]"):
        read_chat(CHAT | {"images": ["p.png"]}, SourceConfig(path="x"), "x:1")
    config = SourceConfig(path="x", columns={"images": "shots"})
    with pytest.raises(InputError, match=r"or skip them with ignore: \[shots\]"):
        read_chat(CHAT | {"shots": ["p.png"]}, config, "x:1")


def test_a_name_to_ignore_that_occurs_nowhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(CHAT) + "\n" + json.dumps({"chat": 1, "messages": STAMPED}) + "\n")
    check_records(SourcesConfig(train=(SourceConfig(path=str(path), ignore=("id", "chat")),)), read_chat)
    with pytest.raises(InputError, match="d.jsonl: no record has the column or key 'ids', which ignore names"):
        check_records(SourcesConfig(train=(SourceConfig(path=str(path), ignore=("id", "ids")),)), read_chat)


def test_a_column_that_is_needed_cannot_be_ignored() -> None:
    with pytest.raises(InputError, match="x:1: ignore names the column 'messages', which is required: remove it"):
        read_chat(CHAT, SourceConfig(path="x", ignore=("messages",)), "x:1")


def test_rewards_get_columns_that_are_ignored() -> None:
    config = SourceConfig(path="x", ignore=("tools",))
    assert read_example({"prompt": "p", "tools": ["calc"]}, config) == {"prompt": "p", "tools": ["calc"]}
