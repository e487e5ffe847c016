"""Data that the model's chat template cannot write, of every algorithm: one line before any weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_rl.cli import main
from automodel_rl.model.handle import ModelHandle
from tests.distributed.trainers.runs import DATA, assert_refused, settings_of, write

TOOL = {"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": {}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
QUESTION, RESULT = {"role": "user", "content": "How many?"}, {"role": "tool", "content": "2"}
ANSWER = {"role": "assistant", "content": "Two."}

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes neither tools nor calls."""

ODD: dict[str, dict[str, Any]] = {
    "sft": {"messages": [QUESTION, CALL, RESULT, ANSWER]},
    "dpo": {"prompt": [QUESTION], "chosen": [CALL, RESULT, ANSWER], "rejected": "Three."},
    "grpo": {"prompt": [QUESTION, CALL, RESULT], "answer": "2"},
}


def plain_template(folder: Path) -> str:
    (folder / "template.jinja").write_text(PLAIN)
    return str(folder / "template.jinja")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("algorithm", ODD)
@pytest.mark.parametrize("what", ["tools", "calls"])
def test_what_the_template_leaves_out_of_a_late_record_is_told_at_the_start(
    workspace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    what: str,
) -> None:
    monkeypatch.setattr(ModelHandle, "from_pretrained", None)
    lines = (workspace / f"train{DATA[algorithm]}.jsonl").read_text().splitlines()
    odd = ODD[algorithm] if what == "calls" else {**json.loads(lines[0]), "tools": json.dumps([TOOL])}
    (tmp_path / "data.jsonl").write_text("\n".join([*lines, json.dumps(odd)]) + "\n")
    settings = settings_of(algorithm, workspace, tmp_path / "run")
    settings["data"] |= {"train": [{"path": str(tmp_path / "data.jsonl")}], "chat_template": plain_template(tmp_path)}
    left_out = "tools, such as 'f'" if what == "tools" else "tool_calls.0.function.name of turn 1 (role assistant)"
    place = f"data.jsonl:{len(lines) + 1}{', chosen' if algorithm == 'dpo' else ''}"
    message = f"{place}: the chat template omits {left_out}"
    assert_refused(algorithm, settings, message, tmp_path, capsys)


def test_plan_looks_at_data_in_the_same_way(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(ODD["sft"]) + "\n")
    data = {"train": [{"path": str(tmp_path / "data.jsonl")}], "chat_template": plain_template(tmp_path)}
    settings = settings_of("sft", workspace, tmp_path / "run", data=data)
    assert main(["plan", write(settings, tmp_path)]) == 2
    assert "data.jsonl:1: the chat template omits tool_calls.0.function.name" in capsys.readouterr().err
