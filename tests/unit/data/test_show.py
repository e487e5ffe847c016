"""Examples are shown with marks around what is trained."""

import json
from pathlib import Path

import pytest
import torch

from automodel_rl.batch import TokenSequence
from automodel_rl.cli import main
from automodel_rl.config.algorithms import KTOConfig
from automodel_rl.data.show import first_examples, stretches_of
from automodel_rl.quickstart.model import train_tokenizer
from tests.unit.data.workspaces import sft_config


def judged_config(tmp_path: Path, records: list[dict], **data: object) -> KTOConfig:
    values = sft_config(tmp_path, None).model_dump(include={"output", "model", "length"})
    path = tmp_path / "judged.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return KTOConfig.model_validate(values | {"data": {"train": [str(path)]} | data, "batch": {"sequences": 2}})


def test_the_first_examples_have_their_places_lengths_and_trained_pieces(tmp_path: Path) -> None:
    chat, text = first_examples(sft_config(tmp_path, None), 5)
    assert (chat.where, text.where) == (f"{tmp_path}/d.jsonl:1", f"{tmp_path}/d.jsonl:2")
    assert "".join(piece for piece, _ in chat.stretches).endswith("<|im_start|>assistant\ntwo<|im_end|>\n")
    assert [piece for piece, is_trained in chat.stretches if is_trained] == ["two<|im_end|>"]
    assert [*text.stretches] == [("one<|im_end|>", True)]
    assert str(text) == f"--- {tmp_path}/d.jsonl:2: {text.num_tokens} tokens, between ⟦ and ⟧\n⟦one<|im_end|>⟧"


def test_a_token_that_is_there_very_often_is_written_once(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["one two"], vocab_size=300)
    ids = [*tokenizer("one")["input_ids"], *[tokenizer.eos_token_id] * 1500, *tokenizer("two")["input_ids"]]
    mask = torch.zeros(len(ids), dtype=torch.bool)
    ((text, is_trained),) = stretches_of(tokenizer, TokenSequence(torch.tensor(ids), mask))
    assert (text, is_trained) == ("one<|im_end|>(x 1,500)two", False)


def test_the_command_prints_them_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = sft_config(tmp_path, None)
    path = tmp_path / "config.yaml"
    path.write_text(config.model_dump_json())
    assert main(["sft", str(path), "--show", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("---") == 1
    assert "⟦two<|im_end|>⟧" in printed
    assert not (tmp_path / "run").exists()
    assert main(["sft", str(path), "--show", "none"]) == 2
    assert "--show none: must be a number of records, 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize(("data", "expected"), [({}, ["four"]), ({"train_on": "all"}, ["two", "four"])])
def test_a_label_judges_the_last_turn_or_all(tmp_path: Path, data: dict[str, str], expected: list[str]) -> None:
    messages = [
        {"role": role, "content": content}
        for role, content in (("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"))
    ]
    (example,) = first_examples(judged_config(tmp_path, [{"messages": messages, "label": False}], **data), 1)
    assert [text.removesuffix("<|im_end|>") for text, is_trained in example.stretches if is_trained] == expected


def test_what_the_run_cuts_off_or_leaves_out_is_marked(tmp_path: Path) -> None:
    record = {"prompt": "one", "completion": "two three", "label": True}
    whole = first_examples(judged_config(tmp_path, [record]), 1)[0]
    most = whole.num_tokens - 2
    shown, refused = first_examples(
        judged_config(tmp_path, [record, record | {"label": 7}], max_tokens=most, on_bad_record="drop"), 2
    )
    assert (shown.num_tokens, shown.note) == (
        most + 2,
        f"{tmp_path}/judged.jsonl:1 has {most + 2} tokens, but only {most} fit (data.max_tokens): cut at its end",
    )
    assert "".join(text for text, _ in shown.stretches) + shown.cut == "".join(text for text, _ in whole.stretches)
    assert f"⟧✂{shown.cut}" in str(shown)
    assert refused.note.endswith(": dropped")
    (dropped,) = first_examples(judged_config(tmp_path, [record], max_tokens=most, overlong="drop"), 1)
    assert dropped.note.endswith("fit (data.max_tokens): dropped")
    assert "⟦" not in str(dropped)
