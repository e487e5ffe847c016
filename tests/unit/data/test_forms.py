"""Forms of records: the columns of widespread datasets make the chats that their authors mean."""

from typing import Any

import pytest

from automodel_rl.config import SourceConfig
from automodel_rl.config.data import SourcesConfig
from automodel_rl.data.checks import check_records
from automodel_rl.data.messages import Chat
from automodel_rl.data.records import (
    READERS,
    Text,
    read_chat,
    read_example,
    read_labelled,
    read_pair,
    read_prompt,
    read_ranked_pair,
)
from automodel_rl.errors import InputError

USER, ANSWER = {"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}
SYSTEM = {"role": "system", "content": "s"}


def source(**values: object) -> SourceConfig:
    return SourceConfig.model_validate({"path": "x", **values})


@pytest.mark.parametrize(
    ("record", "config", "expected"),
    [
        ({"messages": [USER, ANSWER]}, source(), Chat([USER, ANSWER])),
        ({"prompt": "p", "completion": "c"}, source(), Chat([USER, ANSWER], start=1)),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, source(), Chat([SYSTEM, USER, ANSWER], start=2)),
        ({"prompt": [USER, ANSWER, USER], "completion": "c"}, source(), Chat([USER, ANSWER, USER, ANSWER], start=3)),
        ({"text": "whole"}, source(), Text("whole")),
        ({"body": "whole", "messages": "no"}, source(columns={"text": "body"}), Text("whole")),
        (
            {"instruction": "a", "input": "b", "output": "c"},
            source(columns={"prompt": ["instruction", "input"], "completion": "output"}),
            Chat([{"role": "user", "content": "a\nb"}, ANSWER], start=1),
        ),
        (
            {"instruction": "p", "input": "", "output": "c"},
            source(columns={"prompt": ["instruction", "input"], "completion": "output"}),
            Chat([USER, ANSWER], start=1),
        ),
        (
            {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "c", "weight": None}]},
            source(columns={"messages": "conversations"}),
            Chat([USER, ANSWER]),
        ),
        (
            {"data": {"turns": [USER, ANSWER]}},
            source(columns={"messages": "data.turns"}),
            Chat([USER, ANSWER]),
        ),
        ({"messages": [USER, ANSWER]}, source(system="s"), Chat([SYSTEM, USER, ANSWER])),
        ({"messages": [SYSTEM, USER, ANSWER]}, source(system="other"), Chat([SYSTEM, USER, ANSWER])),
        (
            {"prompt": "p", "completion": "c", "rules": "s"},
            source(system="other", columns={"system": "rules"}),
            Chat([SYSTEM, USER, ANSWER], start=2),
        ),
    ],
)
def test_a_form_makes_its_chat(record: dict, config: SourceConfig, expected: Chat | Text) -> None:
    assert read_chat(record, config, "x:1") == expected


@pytest.mark.parametrize(
    ("record", "config", "message"),
    [
        ({"conversations": []}, source(), r"as in columns: {messages: conversations}"),
        ({"instruction": "a", "output": "b"}, source(), r"{prompt: \[instruction, input\], completion: output}"),
        ({"prompt": "p"}, source(), "no column 'messages', no 'prompt' with 'completion' and no 'text', only prompt"),
        ({"prompt": "p"}, source(columns={"completion": "reply"}), "no column 'reply', only prompt"),
        ({"prompt": "p", "completion": [USER]}, source(), "no assistant turn to train on"),
        ({"text": ""}, source(), "text must be a non-empty string"),
        (
            {"messages": [{"from": "narrator", "value": "x"}]},
            source(),
            "turn 0 is from 'narrator': use one of human, gpt",
        ),
        ({"a": "p", "b": 3}, source(columns={"prompt": ["a", "b"], "completion": "a"}), "columns.prompt joins texts"),
    ],
)
def test_what_is_no_form_is_named_with_the_remedy(record: dict, config: SourceConfig, message: str) -> None:
    with pytest.raises(InputError, match=f"x:1: .*{message}"):
        read_chat(record, config, "x:1")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": "r"},
        {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, {"role": "assistant", "content": "r"}]},
        {
            "prompt": [SYSTEM, USER],
            "chosen": [SYSTEM, USER, ANSWER],
            "rejected": [SYSTEM, USER, ANSWER | {"content": "r"}],
        },
    ],
)
def test_completions_of_a_pair_may_repeat_the_prompt_or_hold_it(record: dict) -> None:
    pair = read_pair(record, source(), "x:1")
    assert pair.chosen == Chat([SYSTEM, USER, ANSWER], start=2)
    assert pair.rejected == Chat([SYSTEM, USER, {"role": "assistant", "content": "r"}], start=2)


OTHER_USER = {"role": "user", "content": "q"}
WORSE = {"role": "assistant", "content": "r"}


@pytest.mark.parametrize(
    ("prompt", "held", "before"),
    [
        ("p", [SYSTEM, USER], [SYSTEM, USER]),
        ("p \n", [USER], [USER]),
        ([USER], [{"role": "user", "content": [{"type": "text", "text": " p"}]}], None),
        ("q", [USER, ANSWER, OTHER_USER], [USER, ANSWER, OTHER_USER]),
        ([SYSTEM, USER], [USER], [SYSTEM, USER]),
        ([SYSTEM, USER], [SYSTEM, USER], [SYSTEM, USER]),
        ([USER, ANSWER, OTHER_USER], [OTHER_USER], [USER, ANSWER, OTHER_USER]),
        ([ANSWER, USER], [ANSWER, USER], [ANSWER, USER]),
        ([USER, ANSWER], [USER, ANSWER, OTHER_USER], [USER, ANSWER, OTHER_USER]),
        ([USER, ANSWER], [OTHER_USER], [USER, ANSWER, OTHER_USER]),
    ],
)
def test_completions_that_hold_their_prompt_are_not_asked_twice(prompt: object, held: list, before: list) -> None:
    expected = before or held
    pair = read_pair({"prompt": prompt, "chosen": [*held, ANSWER], "rejected": [*held, WORSE]}, source(), "x:1")
    assert pair.chosen.messages == [*expected, ANSWER]
    assert pair.rejected.messages == [*expected, WORSE]
    chat = read_chat({"prompt": prompt, "completion": [*held, ANSWER]}, source(system="s"), "x:1")
    assert isinstance(chat, Chat)
    assert [m for m in chat.messages if m["role"] != "system"] == [m for m in [*expected, ANSWER] if m != SYSTEM]
    assert chat.messages[0] == SYSTEM
    assert chat.trained == [len(chat.messages) - 1] or held == [OTHER_USER]


@pytest.mark.parametrize(
    ("prompt", "held"),
    [
        ("p", [OTHER_USER]),
        ([{"role": "system", "content": "other"}, USER], [SYSTEM, USER]),
        ([USER, ANSWER, USER], [OTHER_USER]),
    ],
)
def test_a_completion_that_begins_with_another_question_is_refused(prompt: object, held: list) -> None:
    with pytest.raises(InputError, match="x:1: chosen begins with a turn of role .* remove it from chosen"):
        read_pair({"prompt": prompt, "chosen": [*held, ANSWER], "rejected": [*held, WORSE]}, source(), "x:1")
    with pytest.raises(InputError, match="x:1: completion begins with a turn of role"):
        read_chat({"prompt": prompt, "completion": [*held, ANSWER]}, source(), "x:1")


def test_a_pair_whose_completions_answer_other_questions_is_refused() -> None:
    record = {"prompt": "p", "chosen": [USER, ANSWER], "rejected": [SYSTEM, USER, WORSE]}
    with pytest.raises(InputError, match="x:1: chosen and rejected have different messages before their answers"):
        read_pair(record, source(), "x:1")


def test_a_pair_without_any_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="x:1: no column 'prompt', but chosen and rejected do not begin with the same"):
        read_pair({"chosen": [ANSWER], "rejected": "r"}, source(), "x:1")


def test_names_may_be_inside_of_columns() -> None:
    record = {"prompt": "p", "reward_model": {"ground_truth": "4", "style": "rule"}}
    config = source(columns={"answer": "reward_model.ground_truth"}, system="s")
    assert read_example(record, config)["answer"] == "4"
    assert read_prompt(record, config, "x:1") == Chat([SYSTEM, USER], start=2)


def test_a_name_that_no_record_has_is_refused(tmp_path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "p", "reward_model": {"style": "rule"}}\n')
    config = SourceConfig(path=str(path), columns={"answer": "reward_model.ground_truth"})
    with pytest.raises(InputError, match="no record has the column 'reward_model.ground_truth'"):
        check_records(SourcesConfig(train=(config,)), read_prompt)


@pytest.mark.parametrize(("label", "is_good"), [("true", True), ("False", False), ("1", True), (" 0", False)])
def test_a_label_may_be_a_text(label: Any, is_good: bool) -> None:
    record = {"prompt": "a", "completion": "b", "label": label}
    assert read_labelled(record, SourceConfig(path="d.csv"), "d.csv:2").is_good is is_good


@pytest.mark.parametrize(("margin", "value"), [("1.5", 1.5), ("-2", -2.0), ("", 0.0), (0.5, 0.5), (None, 0.0)])
def test_a_margin_may_be_a_text(margin: Any, value: float) -> None:
    record = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    assert read_ranked_pair(record, SourceConfig(path="d.csv"), "d.csv:2").margin == value


@pytest.mark.parametrize(
    ("read", "more", "message"),
    [
        (read_labelled, {"completion": "b", "label": "good"}, "d.csv:2: label is 'good': use true for"),
        (read_ranked_pair, {"chosen": "b", "rejected": "c", "margin": "much"}, "d.csv:2: margin is 'much': use a fin"),
        (read_ranked_pair, {"chosen": "b", "rejected": "c", "margin": "nan"}, "d.csv:2: margin is 'nan': use a fin"),
    ],
)
def test_other_texts_are_no_label_and_no_margin(read: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read({"prompt": "a"} | more, SourceConfig(path="d.csv"), "d.csv:2")


@pytest.mark.parametrize("column", ["image", "image_path", "video", "video_path", "audio_path", "chat_template_kwargs"])
@pytest.mark.parametrize("reads", READERS)
def test_columns_that_only_other_tools_read_are_refused(reads: Any, column: str) -> None:
    record = {"prompt": "p", "completion": "c", "chosen": "c", "rejected": "r", "label": True}
    value = {"reasoning_effort": "low"} if column == "chat_template_kwargs" else "a.jpg"
    for nothing in (None, {}, []):
        READERS[reads](record | {column: nothing}, source(), "x:1")
    READERS[reads](record | {column: value}, source(ignore=[column]), "x:1")
    with pytest.raises(InputError, match=rf"^x:1: has {column}, .*ignore: \[{column}\]"):
        READERS[reads](record | {column: value}, source(), "x:1")
