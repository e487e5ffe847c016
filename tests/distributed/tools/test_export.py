"""A Hugging Face folder from any checkpoint is what the run would have saved itself after that step."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.cli import main
from tests.audio import make_hearing_workspace
from tests.distributed.trainers.runs import Settings, assert_same_weights, settings_of, train, write
from tests.needs import needs_nemo
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model
from tests.vision import make_vision_workspace


def files_of(folder: Path) -> list[str]:
    """Besides the weights."""
    return sorted(path.name for path in folder.iterdir() if ".safetensors" not in path.name)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({}, {"pp": 2}),
        ({"dtype": "bfloat16"}, {"tp": 2}),
        ({"lora": {"rank": 2}}, {"dp_shard": 2}),
        pytest.param({"implementation": "nemo_automodel"}, {"pp": 2}, marks=needs_nemo),
    ],
    ids=["pp2", "bf16 tp2", "adapters dp2", "nemo_automodel"],
)
def test_the_last_checkpoint_exports_to_what_the_run_has_saved(
    ranks: RankPool, workspace: Path, tmp_path: Path, model: Settings, parallel: Settings
) -> None:
    settings = settings_of("sft", workspace, tmp_path / "run", length={"steps": 2}, parallel=parallel)
    base = shutil.copytree(workspace / "model", tmp_path / "model")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))  # not the token that ends turns
    settings["model"] |= {"path": str(base), **model}
    settings["observe"] = {"samples": 0}
    settings["checkpoint"] = {"every_steps": 1}
    ranks(2).run(train, settings)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0  # its newest checkpoint
    assert_same_weights(tmp_path / "run" / "final", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "run" / "final")
    if "lora" not in model:
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        ends = [0, AutoTokenizer.from_pretrained(base).eos_token_id]
        for folder in (tmp_path / "out", tmp_path / "run" / "final"):
            assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("frozen", [[], ["language"]], ids=["all is trained", "frozen language model"])
def test_a_model_that_hears_exports_to_what_the_run_has_saved(tmp_path: Path, frozen: list[str]) -> None:
    """With positions of the encoder that transformers never trains, and with a head that the run has frozen."""
    make_hearing_workspace(tmp_path, num_chats=8)
    settings = settings_of("sft", tmp_path, tmp_path / "run", length={"steps": 1}, batch={"sequences": 4})
    settings["model"] |= {"frozen": frozen}
    settings["batch"]["microbatch_tokens"] = 250
    train(settings)
    assert main(["export", str(tmp_path / "run" / "checkpoints" / "step_1"), str(tmp_path / "out")]) == 0
    assert_same_weights(tmp_path / "run" / "final", tmp_path / "out")


def test_adapters_of_a_mixture_with_dense_layers_export_to_the_same_files(
    ranks: RankPool, workspace: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(workspace / "model")
    save_tiny_model(tmp_path / "model", "qwen3_moe", num_layers=2, mlp_only_layers=[0], vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    settings = settings_of("sft", workspace, run, length={"steps": 1}, observe={"samples": 0})
    settings["model"] = {"path": str(tmp_path / "model"), "dtype": "float32", "lora": {"rank": 2}}
    ranks(1).run(train, settings)
    assert main(["export", str(run / "checkpoints" / "step_1"), str(tmp_path / "out")]) == 0
    assert_same_weights(run / "final", tmp_path / "out")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (run / "final" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with warnings.catch_warnings(action="error"):
        PeftModel.from_pretrained(model, tmp_path / "out")


def test_frozen_parts_of_a_vision_model_are_those_it_started_from(ranks: RankPool, tmp_path: Path) -> None:
    make_vision_workspace(tmp_path, "llava")
    run = tmp_path / "run"
    settings = settings_of("sft", tmp_path, run, length={"steps": 2}, observe={"samples": 0})
    settings["model"]["frozen"] = ["vision"]
    ranks(1).run(train, settings)
    assert main(["export", str(run / "checkpoints" / "step_2"), str(tmp_path / "out")]) == 0
    assert_same_weights(run / "final", tmp_path / "out")


@pytest.mark.usefixtures("one_rank")
def test_both_formats_are_written(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of("sft", workspace, tmp_path / "run", length={"steps": 2}, observe={"samples": 0})
    settings["checkpoint"] = {"every_steps": 2, "format": "both"}
    assert main(["sft", write(settings, tmp_path)]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    assert_same_weights(tmp_path / "run" / "final", checkpoint / "hf")
    assert main(["verify-checkpoint", str(checkpoint)]) == 0


def test_what_cannot_be_exported_is_one_line(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "other").mkdir()
    save_tiny_model(tmp_path / "model", num_layers=1)
    for arguments, message in (
        ([], "export takes a run or a checkpoint, and a new folder"),
        ([str(tmp_path / "model"), str(tmp_path / "there")], "already exists; export creates its own folder"),
        ([str(tmp_path / "other"), str(tmp_path / "out")], "so it is not a complete checkpoint"),
        (
            [str(tmp_path / "model"), str(tmp_path / "out")],
            "is already a model with plain weights: pass a step_N folder",
        ),
    ):
        assert main(["export", *arguments]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("one_rank")
def test_a_foreign_checkpoint_runs_no_code_and_reads_no_other_files(workspace: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}")
    settings = settings_of("sft", workspace, tmp_path / "run", length={"steps": 1}, observe={"samples": 0})
    settings["data"] |= {"chat_template": str(template)}
    assert main(["sft", write(settings, tmp_path)]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    template.write_text("another file of the machine")
    bring_code(workspace / "model", tmp_path / "foreign")
    assert main(["export", str(checkpoint), str(tmp_path / "other"), "--model.path", str(tmp_path / "foreign")]) == 0
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.chat_template.startswith("{% for m in messages %}")


def bring_code(model: Path, folder: Path) -> None:
    """A checkpoint whose tokenizer is of a class of its own."""
    shutil.copytree(model, folder)
    values = json.loads((folder / "tokenizer_config.json").read_text())
    values |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "mine.py").write_text("raise SystemExit('this code has run')")
