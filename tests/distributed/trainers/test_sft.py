"""The command line end to end: a run, stopping and resuming, and all that can be wrong with what a user gives."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_rl.cli import main
from automodel_rl.observe.metrics import read_lines
from tests.distributed.trainers.runs import (
    Settings,
    assert_refused,
    assert_same_weights,
    metrics_of,
    num_lines,
    settings_of,
    train,
    write,
)
from tests.processes import Job, run_command
from tests.rank_pool import RankPool
from tests.warm import cold

Change = Callable[[Settings, Path], None]


@pytest.fixture
def config(workspace: Path, tmp_path: Path) -> Settings:
    return settings_of("sft", workspace, tmp_path / "run")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "automodel_rl", "sft", *arguments]


@pytest.mark.parametrize("started", [list, cold])
def test_a_run_leaves_metrics_report_and_a_model_that_transformers_opens(
    config: Settings, tmp_path: Path, started: Callable[[list[str]], list[str]]
) -> None:
    run = run_command(started(command(write(config, tmp_path), "--parallel.pp", "2", "--checkpoint.every_steps", "2")))
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    folder = tmp_path / "run"
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert [("val/loss" in row) for row in rows] == [False, True, False, True]
    expected = {"train/grad_norm", "train/lr", "train/num_tokens", "perf/tokens_per_second", "perf/mfu"}
    expected |= {"perf/packing_efficiency", "time/step_s", "memory/peak_gib", "data/num_truncated"}
    assert expected <= rows[0].keys()
    assert "step 4/4  loss" in run.stdout
    checking, starting, loading, summary, *_ = run.stdout.splitlines()
    assert checking == "checking config, data and model ..."
    assert starting == "starting 2 ranks ..."
    assert loading.startswith("loading ")
    assert summary.startswith("4 steps: 8 chats a step, of 96, pp 2, float32 on cpu, in ")
    assert yaml.safe_load((folder / "config.yaml").read_text())["parallel"]["pp"] == 2
    assert (folder / "phase.txt").read_text() == f"saving the model to {folder / 'final'}"
    assert '"status": "finished"' in (folder / "report.html").read_text()
    assert len(read_lines(folder / "samples" / "step_4.jsonl")) == config["observe"]["samples"]
    examples = read_lines(folder / "examples" / "step_0.jsonl")
    assert len(examples) == config["observe"]["samples"]
    assert all(any(is_trained for _, is_trained in example["stretches"]) for example in examples)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_2", "step_4"]
    AutoModelForCausalLM.from_pretrained(folder / "final")
    assert AutoTokenizer.from_pretrained(folder / "final").chat_template


def test_a_run_decides_on_the_size_of_microbatches_by_itself(ranks: RankPool, config: Settings, tmp_path: Path) -> None:
    given = config | {"output": str(tmp_path / "given"), "length": {"steps": 1}}
    ranks(1).run(train, given)
    ranks(1).run(train, given | {"output": str(tmp_path / "auto"), "batch": {"sequences": 8}})
    (small,), (large,) = metrics_of(tmp_path / "given"), metrics_of(tmp_path / "auto")
    assert large["train/loss"] == pytest.approx(small["train/loss"], rel=1e-5)
    tokens = small["perf/tokens_per_second"] * small["time/step_s"]
    assert large["perf/packing_efficiency"] == pytest.approx(tokens / 8192, rel=1e-6)


def test_a_stopped_run_resumes_to_the_same_weights_bit_for_bit(
    ranks: RankPool, config: Settings, tmp_path: Path
) -> None:
    config["length"] = {"steps": 12, "validate_every": 11}
    ranks(2).run(train, config | {"output": str(tmp_path / "whole"), "parallel": {"pp": 2}})
    config["data"]["num_workers"] = 1  # its examples are ahead of training
    file = write(config, tmp_path)
    with Job(command(file, "--parallel.pp", "2")) as stopped:
        assert stopped.wait_until(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") >= 3), stopped.stderr
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.finish() == 1
        stderr = stopped.stderr
    assert stderr.startswith("stopped by SIGTERM after step ")
    num_done = int(stderr.split("step ")[1].split(":")[0])
    assert num_done < 12
    resumed = run_command(command(file, "--parallel.pp", "2", "--resume", "auto"))
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, 13))
    assert_same_weights(tmp_path / "whole" / "final", tmp_path / "run" / "final")


def test_a_run_goes_on_on_another_layout(ranks: RankPool, config: Settings, tmp_path: Path) -> None:
    config["optimizer"] = {"lr": 1e-3, "decay": "constant"}
    config["checkpoint"] = {"every_steps": 2}
    whole = config | {"output": str(tmp_path / "whole"), "parallel": {"dp_shard": 2}}
    ranks(2).run(train, whole)
    ranks(1).run(train, config | {"length": {"steps": 2}})
    ranks(2).run(train, config | {"length": {"steps": 4}, "parallel": {"pp": 2}}, "auto")
    rows, expected = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "whole")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, other in zip(rows, expected, strict=True):
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
        assert row["train/num_tokens"] == other["train/num_tokens"]


def set_key(dotted: str, value: object) -> Change:
    def change(config: Settings, tmp_path: Path) -> None:
        *path, last = dotted.split(".")
        for name in path:
            config = config.setdefault(name, {})
        config[last] = {**config[last], **value} if dotted == "model" else value

    return change


def with_data(text: str) -> Change:
    def change(config: Settings, tmp_path: Path) -> None:
        (tmp_path / "bad.jsonl").write_text(text)
        config["data"]["train"] = [{"path": str(tmp_path / "bad.jsonl")}]

    return change


def with_model(damage: Callable[[Path], object]) -> Change:
    def change(config: Settings, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(config["model"]["path"], tmp_path / "bad_model"))
        damage(folder)
        config["model"]["path"] = str(folder)

    return change


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


def put_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def hold_another_run(config: Settings, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\n")


def with_template_error(config: Settings, tmp_path: Path) -> None:
    """Found by a worker process, in tokenising."""
    (tmp_path / "chat.jinja").write_text("{% generation %}{% endgeneration %}{{ raise_exception('no such role') }}")
    config["data"] |= {"chat_template": str(tmp_path / "chat.jinja"), "num_workers": 1, "validation": []}


def untie(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NULL_CONTENT = '{"messages": [{"role": "user", "content": null}, {"role": "assistant", "content": "x"}]}\n'
NO_ASSISTANT = '{"messages": [{"role": "user", "content": "hi"}]}\n'
BAD_INPUT: dict[str, tuple[Change, str]] = {
    "missing file": (set_key("data.train", [{"path": "nowhere.jsonl"}]), "nowhere.jsonl: cannot read the data file"),
    "malformed line": (with_data("{'a': 1}\n"), "bad.jsonl:1: not valid JSON"),
    "no assistant turn": (with_data(NO_ASSISTANT), "bad.jsonl:1: no assistant turn"),
    "null content": (with_data(NULL_CONTENT), "bad.jsonl:1: turn 0 has no text in content"),
    "template error": (with_template_error, "train.jsonl:"),
    "tied weights that differ": (with_model(untie), "config.json ties lm_head.weight to model.embed_tokens.weight"),
    "varlen on a CPU": (
        set_key("model", {"attention": "varlen", "dtype": "bfloat16"}),
        "model.attention=varlen needs CUDA",
    ),
    "less than one example": (set_key("length", {"epochs": 0.001}), "length.epochs=0.001 is less than one example"),
    "output below a file": (set_key("output", __file__ + "/run"), "is not a writable folder"),
    "empty dataset": (with_data(""), "bad.jsonl: the data file is empty"),
    "misspelt key": (set_key("optimizer.learningrate", 1), "optimizer.learningrate: unknown key"),
    "wrong type": (set_key("batch.sequences", "many"), "batch.sequences: must be a whole number, not 'many'"),
    "more stages than layers": (set_key("parallel.pp", 5), "parallel.pp=5: the model has 4 layers"),
    "wrong sum of layers": (
        set_key("parallel", {"pp": 2, "layers_per_stage": [1, 2]}),
        "parallel.layers_per_stage=[1, 2] adds up to 3 but the model has 4 layers",
    ),
    "no weights": (with_model(lambda folder: (folder / "model.safetensors").unlink()), "bad_model: no weights"),
    "truncated weights": (with_model(truncate_weights), "model.safetensors: damaged or incomplete"),
    "NaN weights": (with_model(put_nan), "tensor model.norm.weight holds NaN"),
    "no model": (set_key("model.path", "/nowhere/model"), "model.path=/nowhere/model: folder does not exist"),
    "another run's folder": (hold_another_run, "the folder holds another run"),
    "every example dropped": (
        lambda config, _: (config["batch"].update(microbatch_tokens=8), config["data"].update(overlong="drop")),
        "has a trained token within the 8 tokens that data.max_tokens, batch.microbatch_tokens and",
    ),
    "unsupported layout": (set_key("parallel.ep", 2), "parallel.ep=2: a 'qwen3' model has no experts: use ep=1"),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("change", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_line_and_leaves_nothing(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, message: str
) -> None:
    change(config, tmp_path)
    assert_refused("sft", config, message, tmp_path, capsys)


@pytest.mark.usefixtures("one_rank")
def test_a_run_without_validation_data_and_with_examples_longer_than_a_row(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del config["data"]["validation"]
    config["batch"]["microbatch_tokens"] = 76
    config["length"] = {"steps": 2, "validate_every": 1}
    config["optimizer"] = {"warmup_steps": 2}
    assert main(["sft", write(config, tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("fit (batch.microbatch_tokens): cut at its end; in this step") == 1
    assert printed.count("warning: the warm-up of 2 steps is not shorter than the run's 2 optimizer steps") == 1
    assert "val/loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


@pytest.mark.usefixtures("one_rank")
def test_a_finished_run_goes_on_when_its_limit_is_raised(config: Settings, tmp_path: Path) -> None:
    config["length"] = {"steps": 2}
    assert main(["sft", write(config, tmp_path)]) == 0
    config["length"] = {"steps": 3}
    assert main(["sft", write(config, tmp_path), "--resume=auto"]) == 0
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]


@pytest.mark.usefixtures("one_rank")
def test_the_last_checkpoints_and_the_best_are_kept(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config["length"] = {"steps": 6, "validate_every": 1}
    config["checkpoint"] = {"every_steps": 5, "keep_last": 1}  # so that no checkpoint is due where it is best
    config["optimizer"] = {"lr": 0.3, "decay": "constant"}  # so high that later steps are worse
    assert main(["sft", write(config, tmp_path)]) == 0
    rows = metrics_of(tmp_path / "run")
    best = min(rows, key=lambda row: row["val/loss"])["step"]
    assert best < 5
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == sorted({f"step_{best}", "step_6"})
    config["checkpoint"]["load_best"] = True
    config["output"] = str(tmp_path / "best")
    assert main(["sft", write(config, tmp_path)]) == 0
    assert f"final/ is the best checkpoint, of step {best}, with val/loss" in capsys.readouterr().out
    for step, folder in ((best, "best"), (6, "run")):
        out = tmp_path / f"exported_{step}"
        assert main(["export", str(tmp_path / "run" / "checkpoints" / f"step_{step}"), str(out)]) == 0
        assert_same_weights(out, tmp_path / folder / "final")


@pytest.mark.usefixtures("one_rank")
def test_turns_of_a_chat_may_be_examples_of_their_own(config: Settings, tmp_path: Path) -> None:
    chat = [{"role": role, "content": text} for text in ("one", "two", "three") for role in ("user", "assistant")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    config |= {"length": {"epochs": 1}, "batch": {"sequences": 3, "microbatch_tokens": 512}}
    config["data"] = {"train": [str(tmp_path / "chats.jsonl")], "turns": "split"}
    assert main(["sft", write(config, tmp_path)]) == 0
    split = metrics_of(tmp_path / "run")
    assert [row["data/num_sequences"] for row in split] == [3]
    config |= {"output": str(tmp_path / "other"), "batch": {"sequences": 1, "microbatch_tokens": 512}}
    config["data"]["turns"] = "together"
    assert main(["sft", write(config, tmp_path)]) == 0
    (together,) = metrics_of(tmp_path / "other")
    assert together["data/num_sequences"] == 1
    assert together["train/num_tokens"] == split[0]["train/num_tokens"]


@pytest.mark.usefixtures("one_rank")
def test_groups_of_parameters_learn_at_their_own_rates(
    ranks: RankPool, config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config["length"] = {"steps": 1}
    config["optimizer"] = {"lr": 1e-3, "groups": [{"names": ["lm_head", "embed_tokens", "layers.0"], "lr": 1e-5}]}
    config["parallel"] = {"pp": 2}
    ranks(2).run(train, config)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (config["model"]["path"], tmp_path / "run" / "final")
    )
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        expected = 1e-5 if "embed_tokens" in name or "layers.0." in name else 1e-3
        assert (new - old).abs().max().item() == pytest.approx(expected, rel=0.05), name  # AdamW's first step
    config |= {"output": str(tmp_path / "other"), "parallel": {}}
    config["optimizer"]["groups"] = [{"names": ["no_such"], "lr": 1e-5}]
    assert main(["sft", write(config, tmp_path)]) == 2
    assert "optimizer.groups.0.names=['no_such']: no trained parameter has one of these" in capsys.readouterr().err


def test_a_job_of_another_size_is_refused(config: Settings, tmp_path: Path) -> None:
    config["parallel"] = {"pp": 2}
    agent = ["torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    result = run_command([sys.executable, "-m", *agent, *command(write(config, tmp_path))[1:]])
    assert result.returncode != 0
    assert "error: the job has 1 ranks but the layout needs 2" in result.stderr
    assert not (tmp_path / "run").exists()


def test_bad_input_that_only_the_ranks_can_see_ends_the_job_with_2(config: Settings, tmp_path: Path) -> None:
    with_model(put_nan)(config, tmp_path)
    run = run_command(command(write(config, tmp_path), "--parallel.pp", "2"))
    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert "tensor model.norm.weight holds NaN" in run.stderr
    assert not (tmp_path / "run").exists()
    assert os.listdir(tmp_path / "bad_model")
