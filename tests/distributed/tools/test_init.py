"""A first config from a model and a data file."""

import json
import re
from pathlib import Path

import pytest

from automodel_rl.cli import main
from automodel_rl.config import load_config
from automodel_rl.errors import InputError
from automodel_rl.tools.init import guess_columns, peak_learning_rate
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
    assert "# --resume auto resumes from the newest one\n" in text
    assert load_config(out).algorithm == algorithm
    assert main(["init", algorithm, str(workspace / "model"), str(workspace / data), "--out", str(out)]) == 2
    assert "already exists: pass another file to --out" in capsys.readouterr().err
    if algorithm == "sft":
        short = ["--output", str(tmp_path / "run"), "--length.steps", "1", "--length.epochs", "null"]
        assert main([algorithm, str(out), *short]) == 0
        assert len(metrics_of(tmp_path / "run")) == 1


def test_a_student_gets_its_teacher_and_adapters_their_rate(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, base = tmp_path / "my.yaml", ["distill", str(workspace / "model"), str(workspace / "train.jsonl")]
    assert main(["init", *base, "--out", str(out)]) == 2
    assert "init distill needs --teacher MODEL" in capsys.readouterr().err
    assert main(["init", *base, "--out", str(out), "--teacher", str(workspace / "model"), "--lora"]) == 0
    config = load_config(out)
    assert config.teachers["teacher"].path == str(workspace / "model")
    assert config.model.lora.rank == 16
    plain = tmp_path / "plain.yaml"
    assert main(["init", "sft", *base[1:], "--out", str(plain)]) == 0
    assert config.optimizer.lr == pytest.approx(10 * load_config(plain).optimizer.lr)


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
    for count, device in ((1, "H200"), (1, "4090"), (1, "A10"), (8, "A10")):
        out = tmp_path / f"{count}_{device}.yaml"
        target = ["--gpus", str(count), "--device", device, "--out", str(out)]
        assert main(["init", "sft", str(model), str(workspace / "train.jsonl"), *target]) == 0
        written = load_config(out)
        chosen[count, device] = (written.parallel.world_size, written.model.lora is not None)
    assert chosen == {(1, "H200"): (1, False), (1, "4090"): (1, False), (1, "A10"): (1, True), (8, "A10"): (8, False)}


def write_records(file: Path, records: list[dict]) -> Path:
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


LONG, SHORT = "how many apples? " * 200, "how many?"
"""Texts of more tokens than the small model's context of 512, and of few."""

RECORDS = {
    "sft": ({"prompt": SHORT, "completion": LONG}, {"prompt": SHORT, "completion": SHORT}),
    "dpo": (
        {"prompt": SHORT, "chosen": LONG, "rejected": LONG},
        {"prompt": SHORT, "chosen": SHORT, "rejected": SHORT},
    ),
    "grpo": ({"prompt": LONG, "answer": "1"}, {"prompt": SHORT, "answer": "1"}),
}


@pytest.mark.parametrize(
    ("algorithm", "largest", "note"),
    [
        ("sft", 512, "1 of the 2 records examined are longer than the model's context of 512 tokens and are cut"),
        ("dpo", 1024, "1 of the 2 records examined are longer than the model's context of 512 tokens and are cut"),
        ("grpo", 512, "1 of the 2 records examined are longer than 256 tokens, half of the model's context, and are"),
    ],
)
def test_records_that_the_context_cannot_hold_ask_for_no_room(
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    algorithm: str,
    largest: int,
    note: str,
) -> None:
    monkeypatch.setattr("automodel_rl.tools.init.MIN_ON_CPU", 16)
    out, data = tmp_path / "my.yaml", write_records(tmp_path / "data.jsonl", [*RECORDS[algorithm]])
    assert main(["init", algorithm, str(workspace / "model"), str(data), "--out", str(out)]) == 0
    assert load_config(out).batch.microbatch_tokens == largest
    assert note in capsys.readouterr().out
    assert note in out.read_text()


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
def test_the_longest_record_is_told_as_the_data_have_it(workspace: Path, tmp_path: Path, algorithm: str) -> None:
    """Without the tokens of a completion to come."""
    records = [*RECORDS[algorithm]][1:]
    out, data = tmp_path / "my.yaml", write_records(tmp_path / "data.jsonl", records)
    assert main(["init", algorithm, str(workspace / "model"), str(data), "--out", str(out)]) == 0
    (said,) = re.findall(r"^# 1 records, the longest \D+ (\d+) tokens$", out.read_text(), re.MULTILINE)
    assert 10 < int(said) < 40


@pytest.mark.parametrize(
    ("algorithm", "width", "has_adapters", "rate"),
    [
        ("sft", 4096, False, 1e-5),
        ("grpo", 2048, False, 1e-6),
        ("grpo", 2048, True, 1e-5),
        ("sft", 1024, True, 2e-4),
        ("dpo", 128, False, 2e-5),
    ],
)
def test_adapters_and_narrow_models_get_larger_learning_rates(
    algorithm: str, width: int, has_adapters: bool, rate: float
) -> None:
    assert peak_learning_rate(algorithm, width, has_adapters) == rate


def test_a_folder_of_adapters_goes_on_with_their_learning_rate_and_their_memory(
    workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapters").mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": str(workspace / "model"), "r": 2, "lora_alpha": 4}
    about |= {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(about))
    written = {}
    for model in (workspace / "model", tmp_path / "adapters"):
        out = tmp_path / f"{model.name}.yaml"
        target = ["--out", str(out), "--gpus", "1", "--device", "H200"]
        assert main(["init", "grpo", str(model), str(workspace / "train_prompts.jsonl"), *target]) == 0
        written[model.name] = load_config(out)
    assert written["adapters"].optimizer.lr == pytest.approx(10 * written["model"].optimizer.lr, rel=0.3)
    assert written["adapters"].model.lora is None


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
    with pytest.raises(InputError, match="x:1: no columns for dpo, only a, b: write the config by hand"):
        guess_columns("dpo", {"a": 1, "b": 2}, "x:1")
