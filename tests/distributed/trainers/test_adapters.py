"""Adapters from one run to the next: sft, then grpo on them or on the merged model, then a whole model."""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.cli import main
from tests.distributed.trainers.runs import Settings, assert_same_weights, metrics_of, settings_of, train, write
from tests.rank_pool import RankPool

LORA = {"rank": 2, "targets": "all-linear", "rslora": True, "dropout": 0.1}


def fine_tuned(ranks: RankPool, workspace: Path, folder: Path, **changes: object) -> Path:
    """The folder of adapters from an sft run."""
    settings = settings_of("sft", workspace, folder / "lora", observe={"samples": 0}, **changes)
    settings["model"] |= {"dtype": "float64", "lora": LORA}
    settings["optimizer"] = {"lr": 3e-2}
    ranks(2).run(train, settings | {"parallel": {"dp_shard": 2}})
    return folder / "lora" / "final"


def grpo_on(workspace: Path, folder: Path, name: str, **model: object) -> Settings:
    settings = settings_of("grpo", workspace, folder / name, length={"steps": 2}, observe={"samples": 0})
    settings["batch"]["optimizer_steps"] = 1
    return settings | {"model": {"dtype": "float64", **model}, "parallel": {"pp": 2}}


def test_grpo_goes_on_with_the_adapters_of_sft_or_with_the_merged_model(
    ranks: RankPool, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = fine_tuned(ranks, workspace, tmp_path)
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str((workspace / "model").absolute())
    assert (config["use_rslora"], config["lora_dropout"]) == (True, 0.1)
    for name, model in (
        ("adapters", {"path": str(adapters)}),
        ("merged", {"path": str(adapters), "merge_adapters": 1}),
    ):
        ranks(2).run(train, grpo_on(workspace, tmp_path, name, **model))
        first, last = metrics_of(tmp_path / name)
        # The reference is the fine-tuned policy, and so is what the generator samples from.
        assert first["train/logprob_error"] == pytest.approx(1, abs=1e-6)
        assert first["train/kl_ref"] < 1e-12 < last["train/kl_ref"]
    first_rows = [metrics_of(tmp_path / name)[0] for name in ("adapters", "merged")]
    assert first_rows[0]["train/loss"] == pytest.approx(first_rows[1]["train/loss"], abs=1e-9)
    final = tmp_path / "adapters" / "final"
    assert json.loads((final / "adapter_config.json").read_text())["r"] == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "final")
    whole = AutoPeftModelForCausalLM.from_pretrained(final, dtype=torch.float64).merge_and_unload()
    assert main(["export", str(final), str(tmp_path / "out"), "--merge"]) == 0
    for own, right in zip(
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").parameters(), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(own.double(), right.double(), rtol=1e-5, atol=1e-7)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(workspace / "model").chat_template


def test_a_step_with_adapters_exports_merged(
    ranks: RankPool, workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = fine_tuned(ranks, workspace, tmp_path, length={"steps": 2})
    step = tmp_path / "lora" / "checkpoints" / "step_2"
    assert main(["export", str(step), str(tmp_path / "step"), "--merge"]) == 0
    assert main(["export", str(adapters), str(tmp_path / "final"), "--merge"]) == 0
    of_step, of_final = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("step", "final"))
    for one, other in zip(of_step.parameters(), of_final.parameters(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-7)  # in the run's, the base's dtype
    for arguments, message in (
        ([str(adapters), str(tmp_path / "no")], "already holds adapters in PEFT's format: add --merge"),
        ([str(adapters), str(tmp_path / "no"), "--merge", "--seed", "1"], "only --model.path is read"),
    ):
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
    moved = (workspace / "model").rename(workspace / "moved")
    assert main(["export", str(adapters), str(tmp_path / "no"), "--merge"]) == 2
    assert "in model.path, and these adapters in model.adapters" in capsys.readouterr().err
    assert main(["export", str(adapters), str(tmp_path / "yes"), "--merge", "--model.path", str(moved)]) == 0
    assert_same_weights(tmp_path / "yes", tmp_path / "final")
    moved.rename(workspace / "model")
    assert not (tmp_path / "no").exists()


@pytest.mark.usefixtures("one_rank")
def test_dropout_is_drawn_again_where_a_run_resumes(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of("sft", workspace, tmp_path / "whole", length={"steps": 4}, observe={"samples": 0})
    settings["model"] |= {"lora": LORA}
    settings["checkpoint"] = {"every_steps": 2}
    assert main(["sft", write(settings, tmp_path)]) == 0
    resume = ["--resume", str(tmp_path / "whole" / "checkpoints" / "step_2"), "--output", str(tmp_path / "resumed")]
    assert main(["sft", write(settings, tmp_path), *resume]) == 0
    assert_same_weights(tmp_path / "whole" / "final", tmp_path / "resumed" / "final")
    settings["model"]["lora"] = LORA | {"dropout": 0.0}
    assert main(["sft", write(settings, tmp_path), "--output", str(tmp_path / "without")]) == 0
    losses = [[row["train/loss"] for row in metrics_of(tmp_path / name)] for name in ("whole", "without")]
    assert losses[0][2:] != losses[1][2:]


@pytest.mark.usefixtures("one_rank")
def test_a_run_on_adapters_resumes_on_these_adapters_alone(
    workspace: Path, tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = fine_tuned(ranks, workspace, tmp_path)
    settings = settings_of("sft", workspace, tmp_path / "whole", length={"steps": 4}, observe={"samples": 0})
    settings["model"] = {"path": str(adapters), "dtype": "float32"}
    settings["checkpoint"] = {"every_steps": 2}
    assert main(["sft", write(settings, tmp_path)]) == 0
    resume = ["--resume", str(tmp_path / "whole" / "checkpoints" / "step_2"), "--output", str(tmp_path / "resumed")]
    assert main(["sft", write(settings, tmp_path), *resume]) == 0
    assert_same_weights(tmp_path / "whole" / "final", tmp_path / "resumed" / "final")
    adapted = adapters / "adapter_model.safetensors"
    kept = adapted.read_bytes()
    save_file({name: tensor + 1e-6 for name, tensor in load_file(adapted).items()}, adapted)
    assert main(["sft", write(settings, tmp_path), *resume[:2], "--output", str(tmp_path / "third")]) == 2
    assert "if the change is intended, remove manifest.json" in capsys.readouterr().err
    (adapters / "manifest.json").unlink()
    assert main(["sft", write(settings, tmp_path), *resume[:2], "--output", str(tmp_path / "third")]) == 2
    assert "its weights or adapters differ from those that" in capsys.readouterr().err
    adapted.write_bytes(kept)
    assert main(["plan", write(settings, tmp_path)]) == 0
    assert main(["verify", write(settings, tmp_path)]) == 0


@pytest.mark.usefixtures("one_rank")
def test_adapters_keep_the_base_in_nf4_that_they_were_trained_on(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of("sft", workspace, tmp_path / "lora", length={"steps": 2, "validate_every": 2})
    settings |= {"observe": {"samples": 0}, "checkpoint": {"every_steps": 2}}
    settings["model"] |= {"dtype": "float64", "lora": LORA | {"dropout": 0.0, "base": "nf4"}}
    assert main(["sft", write(settings, tmp_path)]) == 0
    final, step = (tmp_path / "lora" / name for name in ("final", "checkpoints/step_2"))
    assert main(["export", str(final), str(tmp_path / "of final"), "--merge"]) == 0
    assert main(["export", str(step), str(tmp_path / "of step"), "--merge", "--model.dtype", "float32"]) == 0
    assert_same_weights(tmp_path / "of final", tmp_path / "of step")
    right = [row["val/loss"] for row in metrics_of(tmp_path / "lora") if "val/loss" in row][-1]
    settings["optimizer"], settings["length"] = {"lr": 1e-12}, {"steps": 1, "validate_every": 1}
    for name, model in (
        ("merged", {"path": str(tmp_path / "of final")}),
        ("adapters", {"path": str(final)}),
        ("merged here", {"path": str(final), "merge_adapters": True}),
    ):
        settings |= {"output": str(tmp_path / name), "model": {"dtype": "float64", **model}}
        assert main(["sft", write(settings, tmp_path)]) == 0
        assert metrics_of(tmp_path / name)[-1]["val/loss"] == pytest.approx(right, abs=1e-7)
    AutoPeftModelForCausalLM.from_pretrained(final)
