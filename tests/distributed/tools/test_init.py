"""A first config from a model and a data file."""

import json
from pathlib import Path

import pytest

from automodel_rl.cli import main
from automodel_rl.config import load_config
from automodel_rl.errors import InputError
from automodel_rl.tools.init import guess_columns
from tests.audio import make_hearing_workspace
from tests.distributed.trainers.runs import metrics_of
from tests.tiny import save_tiny_model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("algorithm", "data"), [("sft", "train.jsonl"), ("dpo", "train_pairs.jsonl"), ("grpo", "train_prompts.jsonl")]
)
def test_a_written_config_is_commented_and_trains(
    workspace: Path, tmp_path: Path, algorithm: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my.yaml"
    assert main(["init", algorithm, str(workspace / "model"), str(workspace / data), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "no GPU here: one rank on the CPU, in float32" in said
    assert f"next: automodel-rl plan {out}; automodel-rl {algorithm} {out}" in said
    text = out.read_text()
    assert "# --resume auto goes on from the newest one\n" in text
    assert load_config(out).algorithm == algorithm
    assert main(["init", algorithm, str(workspace / "model"), str(workspace / data), "--out", str(out)]) == 2
    assert "exists already: give another file in --out" in capsys.readouterr().err
    if algorithm == "sft":
        short = ["--output", str(tmp_path / "run"), "--length.steps", "1", "--length.epochs", "null"]
        assert main([algorithm, str(out), *short]) == 0
        assert len(metrics_of(tmp_path / "run")) == 1


def test_columns_of_other_datasets_are_named(workspace: Path, tmp_path: Path) -> None:
    record = {"instruction": "say hi", "input": "", "output": "hi"}
    (tmp_path / "alpaca.jsonl").write_text(json.dumps(record) + "\n")
    out = tmp_path / "my.yaml"
    target = ["--gpus", "8", "--device", "l40s"]
    assert (
        main(["init", "sft", str(workspace / "model"), str(tmp_path / "alpaca.jsonl"), "--out", str(out), *target]) == 0
    )
    config = load_config(out)
    assert config.data.train[0].columns == {"prompt": ("instruction", "input"), "completion": "output"}
    assert config.parallel.dp_shard == 8
    assert "# 8 x L40S: dp_shard 8, " in out.read_text()


def test_a_layout_that_fits_is_chosen(workspace: Path, tmp_path: Path) -> None:
    """A model of a few GiB on cards that hold its states only when they are sharded."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_layers": 24}
    save_tiny_model(tmp_path / "empty", num_layers=1)
    config = json.loads((tmp_path / "empty" / "config.json").read_text()) | {"hidden_size": sizes["hidden_size"]}
    config |= {"intermediate_size": 6144, "num_hidden_layers": 24, "head_dim": 128, "num_attention_heads": 16}
    config |= {"vocab_size": 32_000, "num_key_value_heads": 8, "max_position_embeddings": 4096, "layer_types": None}
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (workspace / "model" / name).is_file():
            (model / name).write_bytes((workspace / "model" / name).read_bytes())
    (model / "config.json").write_text(json.dumps(config))
    chosen = {}
    for count, device in ((1, "H200"), (1, "4090"), (8, "4090")):
        out = tmp_path / f"{count}_{device}.yaml"
        target = ["--gpus", str(count), "--device", device, "--out", str(out)]
        assert main(["init", "sft", str(model), str(workspace / "train.jsonl"), *target]) == 0
        written = load_config(out)
        chosen[count, device] = (written.parallel.world_size, written.model.lora is not None)
    assert chosen == {(1, "H200"): (1, False), (1, "4090"): (1, True), (8, "4090"): (8, False)}


def test_a_model_that_hears_gets_a_number_of_tokens(tmp_path: Path) -> None:
    make_hearing_workspace(tmp_path, num_chats=8)
    out = tmp_path / "sft.yaml"
    target = ["--out", str(out), "--gpus", "1", "--device", "H200"]
    assert main(["init", "sft", str(tmp_path / "model"), str(tmp_path / "train.jsonl"), *target]) == 0
    assert main(["plan", str(out)]) == 0


@pytest.mark.parametrize(
    ("algorithm", "record", "columns"),
    [
        ("sft", {"conversations": [{"from": "human", "value": "a"}]}, {"messages": "conversations"}),
        ("sft", {"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}),
        ("sft", {"text": "a"}, {}),
        ("grpo", {"problem": "a", "reward_model": {"ground_truth": "1"}}, None),
        ("grpo", {"problem": "a", "solution": "1"}, {"prompt": "problem", "answer": "solution"}),
        ("dpo", {"chosen": "a", "rejected": "b"}, {}),
    ],
)
def test_columns_are_guessed(algorithm: str, record: dict, columns: dict | None) -> None:
    expected = {"prompt": "problem", "answer": "reward_model.ground_truth"} if columns is None else columns
    assert guess_columns(algorithm, record, "x:1") == expected


def test_what_no_algorithm_reads_is_refused() -> None:
    with pytest.raises(InputError, match="x:1: no columns that dpo knows, only a, b: write the config by hand"):
        guess_columns("dpo", {"a": 1, "b": 2}, "x:1")
