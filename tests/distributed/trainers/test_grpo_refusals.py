"""Configs of reinforcement learning that are refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.trainers.runs import (
    Settings,
    assert_refused,
    settings_of,
)


def values(workspace: Path, output: Path, **changes: Any) -> Settings:
    return settings_of("grpo", workspace, output, **changes)


def drop_answers(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "How many?"}) + "\n")
    settings["data"] = {"train": [{"path": str(path)}]}
    settings["rewards"] = [{"function": "last_number"}]


BAD: list[tuple[Callable[[Settings, Path], None], str]] = [
    (drop_answers, "prompts.jsonl:1: no answer, which rewards.function=last_number needs"),
    (lambda s, _: s["rollout"].update(max_prompt_tokens=4), "all 96 prompts are longer than rollout.max_prompt_tokens"),
    (
        lambda s, _: s["batch"].update(microbatch_tokens=20),
        "batch.microbatch_tokens=20 must hold the longest prompt and completion",
    ),
    (
        lambda s, _: (s["rollout"].update(max_new_tokens=600), s["batch"].update(microbatch_tokens=2048)),
        "is more than the model's context of 512 tokens",
    ),
    (lambda s, _: s["rollout"].update(group_size=1), "rollout.group_size=1: completions are compared within their"),
    (lambda s, _: s["batch"].update(optimizer_steps=3), "batch.optimizer_steps=3 must divide rollout.prompts=4"),
    (lambda s, _: s["loss"].update(on_policy=True), "loss.on_policy=true with batch.optimizer_steps=2"),
    (
        lambda s, _: (
            s["batch"].update(optimizer_steps=1),
            s.update(loss={"on_policy": True, "kl": {"coefficient": 0.1, "where": "reward"}}),
        ),
        "loss.kl.where=reward with loss.on_policy=true",
    ),
    (lambda s, _: s.update(rewards=[{"function": "nonsense"}]), "rewards.function=nonsense: use one of"),
    (
        lambda s, _: s.update(rewards=[{"function": "length", "options": {"limit": 5}}]),
        "rewards.function=length: options {'limit': 5} do not fit",
    ),
    (lambda s, _: s.update(loss_function="nowhere:loss"), "loss_function=nowhere:loss: cannot import it"),
    (lambda s, _: s.update(algorithm="sft"), "is a config for sft, not grpo: run automodel-rl sft"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable, message: str
) -> None:
    settings = values(workspace, tmp_path / "run")
    change(settings, tmp_path)
    assert_refused("grpo", settings, message, tmp_path, capsys)
