"""What a run reads has a fingerprint that changes with its content, and with nothing else."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from automodel_rl.config.algorithms import GRPOConfig
from automodel_rl.data import fingerprints
from automodel_rl.data.fingerprints import Change, as_json, changes, inputs_of
from tests.tiny import save_tiny_model

RECORD = {"prompt": "a", "answer": "b"}


def write_records(path: Path, count: int, **more: str) -> None:
    path.write_text("".join(json.dumps({**RECORD, "n": number, **more}) + "\n" for number in range(count)))


@pytest.fixture
def config(tmp_path: Path) -> GRPOConfig:
    save_tiny_model(tmp_path / "model", num_layers=1)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    for name in ("train", "more_1", "more_2", "held_out"):
        write_records(tmp_path / f"{name}.jsonl", 16)
    return GRPOConfig.model_validate(
        {
            "algorithm": "grpo",
            "output": str(tmp_path / "run"),
            "model": {"path": str(tmp_path / "model")},
            "data": {
                "train": [{"path": str(tmp_path / "train.jsonl")}, {"path": str(tmp_path / "more_*.jsonl")}],
                "validation": [{"path": str(tmp_path / "held_out.jsonl")}],
                "chat_template": str(tmp_path / "template.jinja"),
            },
            "rewards": [{"function": "tests.light_rewards:vowels"}],
            "batch": {"microbatch_tokens": 64},
            "rollout": {"prompts": 1, "group_size": 2, "max_prompt_tokens": 8, "max_new_tokens": 8},
            "length": {"steps": 1},
        }
    )


def test_each_change_is_found_and_nothing_else(config: GRPOConfig, tmp_path: Path) -> None:
    before = json.loads(as_json(inputs_of(config, Path(config.model.path))))

    def changed() -> list[Change]:
        return changes(before, inputs_of(config, Path(config.model.path)))

    os.utime(tmp_path / "train.jsonl", (0, 0))
    (tmp_path / "model" / "model.safetensors").unlink()  # weights have a fingerprint of their own
    assert changed() == []
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "two"}))
    assert changed() == []  # the config gives another
    write_records(tmp_path / "train.jsonl", 21)
    (one,) = changed()
    assert str(one) == f"data.train.0: {tmp_path}/train.jsonl, 16 records -> {tmp_path}/train.jsonl, 21 records"
    write_records(tmp_path / "train.jsonl", 16)
    write_records(tmp_path / "more_2.jsonl", 16, more="x")
    (one,) = changed()
    assert str(one) == f"data.train.1: {tmp_path}/more_*.jsonl, 32 records -> different content"
    assert one.before.follows == "its position in the data would refer to other records"
    write_records(tmp_path / "held_out.jsonl", 17)
    (tmp_path / "model" / "tokenizer.json").write_text("{ }")
    (tmp_path / "template.jinja").write_text("{{ messages[0] }}")
    found = {change.key: bool(change.before.follows) for change in changed()}
    assert found == {"data.train.1": True, "data.validation.0": False, "tokenizer": True, "data.chat_template": True}


def test_code_that_the_config_names_is_compared(config: GRPOConfig, tmp_path: Path) -> None:
    before = json.loads(as_json(inputs_of(config, Path(config.model.path))))
    edited = shutil.copy("tests/light_rewards.py", tmp_path / "light_rewards.py")
    Path(edited).write_text(Path(edited).read_text() + "\n")
    with mock.patch.object(fingerprints, "_file_of", return_value=Path(edited)):
        (one,) = changes(before, inputs_of(config, Path(config.model.path)))
    assert (one.key, one.before.follows) == ("rewards.0.function", "")


def test_of_large_files_parts_are_read_up_to_both_ends(tmp_path: Path) -> None:
    file = tmp_path / "large"
    sizes = {"WHOLE": 100, "NUM_PARTS": 4, "PART_BYTES": 10}
    with mock.patch.multiple(fingerprints, **sizes):
        file.write_bytes(bytes(range(200)))
        assert [piece[:1] for piece in fingerprints._content(file)][1:] == [b"\x00", b"\x3f", b"\x7e", b"\xbe"]
        file.write_bytes(bytes(range(95)))
        assert b"".join([*fingerprints._content(file)][1:]) == bytes(range(95))
