"""From where a run goes on, and what makes it stop."""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from automodel_rl.batch import Microbatch
from automodel_rl.cli import main
from automodel_rl.launch.flight import flight
from automodel_rl.losses import LossOutput, TokenOutputs
from tests.distributed.trainers.runs import (
    Settings,
    assert_same_weights,
    metrics_of,
    num_lines,
    settings_of,
    train,
    write,
)
from tests.processes import Job, children_of, run_command
from tests.rank_pool import RankPool


@pytest.fixture
def config(workspace: Path, tmp_path: Path) -> Settings:
    settings = settings_of("sft", workspace, tmp_path / "run", length={"steps": 4}, observe={"samples": 0})
    settings["checkpoint"] = {"every_steps": 1, "keep_last": 9}
    settings["data"].pop("validation")
    return settings


@pytest.mark.usefixtures("one_rank")
def test_a_run_may_go_on_from_any_checkpoint_in_a_folder_of_its_own(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(config, tmp_path)
    assert main(["sft", file]) == 0
    second = str(tmp_path / "run" / "checkpoints" / "step_2")
    assert main(["sft", file, "--resume", second]) == 2
    assert "holds step_4, which is past it: choose another output" in capsys.readouterr().err
    assert main(["sft", file, "--resume", second, "--output", str(tmp_path / "branch")]) == 0
    assert "resuming from step 2" in capsys.readouterr().out
    assert [row["step"] for row in metrics_of(tmp_path / "branch")] == [3, 4]
    assert_same_weights(tmp_path / "run" / "final", tmp_path / "branch" / "final")
    other = ["--output", str(tmp_path / "other"), "--optimizer.lr", "1e-5"]
    assert main(["sft", file, "--resume", second, *other]) == 0
    assert f"resuming from {second}, of a run that differs in output, optimizer.lr" in capsys.readouterr().out


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "always"], "--resume always: must be auto, never or the folder of a checkpoint"),
        (["--max-minutes", "soon"], "--max-minutes soon: must be a number above 0"),
        (["--max-minutes", "-1"], "--max-minutes -1: must be a number above 0"),
        (["--resume", "configs"], "configs: no checkpoint.json, so it is not a complete checkpoint"),
    ],
)
def test_what_cannot_be_gone_on_from_is_one_line(
    config: Settings, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", write(config, tmp_path), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("one_rank")
def test_a_resumed_run_may_learn_at_another_rate(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config["length"] = {"steps": 2}
    config["optimizer"] = {"lr": 1e-3, "decay": "constant"}
    assert main(["sft", write(config, tmp_path)]) == 0
    config["length"] = {"steps": 3}
    changes = ["--optimizer.lr", "5e-4", "--checkpoint.keep_last", "5"]
    assert main(["sft", write(config, tmp_path), "--resume", "auto", *changes]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("changed since it was stopped: ")]
    for change in ("length.steps 2 -> 3", "optimizer.lr 0.001 -> 0.0005", "checkpoint.keep_last 9 -> 5"):
        assert change in line
    assert [row["train/lr"] for row in metrics_of(tmp_path / "run")] == [1e-3, 1e-3, 5e-4]
    assert main(["sft", write(config, tmp_path), "--resume", "auto", "--optimizer.betas", "[0.8, 0.9]"]) == 2
    assert "with other values, pass --resume CHECKPOINT --output NEW" in capsys.readouterr().err


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo"])
@pytest.mark.parametrize("every_steps", [1, None], ids=["with checkpoints", "without"])
def test_a_finished_run_stays_as_it_is(
    workspace: Path, tmp_path: Path, algorithm: str, every_steps: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(algorithm, workspace, tmp_path / "run", length={"steps": 2}, observe={"samples": 0})
    settings["checkpoint"] = {"every_steps": every_steps}
    settings["data"].pop("validation")
    file = write(settings, tmp_path)
    assert main([algorithm, file]) == 0
    before = contents_of(tmp_path / "run")
    capsys.readouterr()
    assert main([algorithm, file, "--resume", "auto", "--length.steps", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "length.steps=1: the run in" in line
    assert "is already at step 2" in line
    assert main([algorithm, file, "--resume", "auto"]) == 0
    assert "is finished: its 2 steps are done" in capsys.readouterr().out
    assert contents_of(tmp_path / "run") == before


@pytest.mark.usefixtures("one_rank")
def test_epochs_that_are_done_are_told_as_steps_are(
    config: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config |= {"length": {"epochs": 0.25}}  # of 96 chats, 8 a step
    file = write(config, tmp_path)
    assert main(["sft", file]) == 0
    before = contents_of(tmp_path / "run")
    capsys.readouterr()
    assert main(["sft", file, "--resume", "auto", "--length.epochs", "0.15"]) == 2
    assert "length.epochs=0.15, which is 2 steps: the run in output" in capsys.readouterr().err
    branch = ["--resume", str(tmp_path / "run" / "checkpoints" / "step_3"), "--output", str(tmp_path / "branch")]
    assert main(["sft", file, *branch, "--length.epochs", "0.15"]) == 2
    assert "is already at step 3" in capsys.readouterr().err
    assert not (tmp_path / "branch").exists()
    assert main(["sft", file, "--resume", "auto"]) == 0
    assert "is finished: its 3 steps are done" in capsys.readouterr().out
    assert contents_of(tmp_path / "run") == before


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_is_missing_or_of_an_earlier_end_is_written(config: Settings, tmp_path: Path) -> None:
    file, run = write(config, tmp_path), tmp_path / "run"
    assert main(["sft", file, "--length.steps", "2"]) == 0
    early = shutil.copytree(run / "final", tmp_path / "early")
    mark = (run / ".finished_after").read_text()
    assert main(["sft", file, "--resume", "auto"]) == 0
    late, settings = shutil.copytree(run / "final", tmp_path / "late"), (run / "config.yaml").read_text()
    shutil.rmtree(run / "final")
    assert main(["sft", file, "--resume", "auto"]) == 0
    assert_same_weights(late, run / "final")
    shutil.rmtree(run / "final")
    shutil.copytree(early, run / "final")  # as if the disk had been full at the second end
    (run / ".finished_after").write_text(mark)
    assert main(["sft", file, "--resume", "auto"]) == 0
    assert_same_weights(late, run / "final")
    assert (run / "config.yaml").read_text() == settings


def broken_loss(outputs: TokenOutputs, batch: Microbatch) -> LossOutput:
    raise MemoryError


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_run_whose_first_step_failed_is_begun_anew(
    workspace: Path, tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    length = {"steps": 1, "validate_every": 1}
    file = write(settings_of(algorithm, workspace, tmp_path / "run", length=length), tmp_path)
    command = [sys.executable, "-m", "automodel_rl", algorithm, file]
    broken = [*command, "--loss_function", f"{__name__}:{broken_loss.__name__}"]
    failed = run_command(broken)
    assert failed.returncode == 1
    assert "MemoryError" in failed.stderr
    assert (tmp_path / "run" / "config.yaml").is_file()
    done = run_command(command)
    assert done.returncode == 0, done.stderr
    assert "run holds a run that finished no step; this run replaces it" in done.stdout
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == ([0, 1] if algorithm == "grpo" else [1])
    assert "loss_function: null" in (tmp_path / "run" / "config.yaml").read_text()
    assert main([algorithm, file]) == 2
    assert "already holds this run" in capsys.readouterr().err


def test_a_run_saves_and_stops_before_its_time_is_up(ranks: RankPool, config: Settings, tmp_path: Path) -> None:
    config["length"] = {"steps": 400}
    config["checkpoint"] = {"every_steps": None, "every_minutes": 0.1}
    config["parallel"] = {"pp": 2}
    assert ranks(2).run(stop_in_time, config, 0.5) == ["stopped by --max-minutes"] * 2
    done = len(metrics_of(tmp_path / "run"))
    assert 0 < done < 400
    kept = [int(path.name.removeprefix("step_")) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len(kept) > 1, "every_minutes had no effect"
    assert max(kept) == done
    config["length"] = {"steps": done + 1}
    ranks(2).run(train, config, "auto")
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [*range(1, done + 2)]


class Clock:
    """One that goes on by a second whenever it is looked at, which is once a step, however slow the machine is."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        self.now += 1.0
        return self.now

    monotonic = time


def stop_in_time(config: Settings, minutes: float) -> str:
    import automodel_rl
    from automodel_rl.config.algorithms import SFTConfig
    from automodel_rl.errors import StoppedError
    from automodel_rl.trainers import run, run_checkpoints

    with (
        mock.patch.object(flight, "started", 0.0),
        mock.patch.object(run, "time", Clock()),
        mock.patch.object(run_checkpoints, "time", Clock()),
    ):
        try:
            automodel_rl.train(SFTConfig.model_validate(config), max_minutes=minutes)
        except StoppedError as error:
            return str(error).partition(" after step")[0]
    return "went on"


def test_ranks_that_an_agent_starts_again_go_on_by_themselves(
    ranks: RankPool, config: Settings, tmp_path: Path
) -> None:
    config |= {"length": {"steps": 12}, "parallel": {"pp": 2}}
    ranks(2).run(train, config | {"output": str(tmp_path / "whole")})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    with Job([*command, "-m", "automodel_rl", "sft", write(config, tmp_path)]) as agent:
        assert agent.wait_until(lambda: num_lines(tmp_path / "run" / "metrics.jsonl") >= 3), agent.stderr
        os.kill(children_of(agent.process.pid)[-1], signal.SIGKILL)
        assert agent.finish() == 0, agent.stderr
        assert "resuming from step" in agent.stdout
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [*range(1, 13)]
    assert_same_weights(tmp_path / "whole" / "final", tmp_path / "run" / "final")


@pytest.fixture
def heeds_the_terminal() -> Iterator[None]:
    """What is started does, also if these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeds_the_terminal")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_whose_terminal_is_closed_saves_and_stops(config: Settings, tmp_path: Path, num_ranks: int) -> None:
    config |= {"length": {"steps": 4000}, "parallel": {"pp": num_ranks}, "checkpoint": {"every_steps": None}}
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    command = ["setsid", "--ctty", "--wait", sys.executable, "-m", "automodel_rl", "sft", write(config, tmp_path)]
    with Job(command, **terminal) as job:
        os.close(theirs)
        assert job.wait_until(lambda: read(ours) and num_lines(tmp_path / "run" / "metrics.jsonl") >= 5)
        os.close(ours)
        assert job.finish() == 1
    done = len(metrics_of(tmp_path / "run"))
    assert 5 <= done < 4000
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{done}"]


def read(terminal: int) -> bool:
    """Takes what was printed, for a full terminal blocks those who print."""
    with contextlib.suppress(BlockingIOError):
        while os.read(terminal, 65536):
            pass
    return True


@pytest.mark.usefixtures("one_rank")
def test_data_that_have_changed_are_refused_or_accepted_and_said(
    config: Settings, tmp_path: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(shutil.copy(workspace / "train.jsonl", tmp_path / "train.jsonl"))
    config["data"]["train"] = [{"path": data}]
    file = write(config, tmp_path)
    assert main(["sft", file, "--length.steps", "1"]) == 0
    before = contents_of(tmp_path / "run")
    lines = Path(data).read_text().splitlines(keepends=True)
    Path(data).write_text("".join([*lines, *lines[:5]]))
    capsys.readouterr()
    assert main(["sft", file, "--resume", "auto"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"data.train.0: {data}, 96 records -> {data}, 101 records: it has changed since " in line
    assert contents_of(tmp_path / "run") == before
    accepted = ["--checkpoint.accept_changed_inputs", "true"]
    assert main(["sft", file, "--resume", "auto", "--length.steps", "2", *accepted]) == 0
    said = capsys.readouterr().out
    assert f"step_1: data.train.0: {data}, 96 records -> {data}, 101 records" in said
    assert main(["sft", file, "--resume", "auto", "--length.steps", "3"]) == 0  # it has been accepted
    branch = ["--resume", str(tmp_path / "run" / "checkpoints" / "step_1"), "--output", str(tmp_path / "branch")]
    assert main(["sft", file, *branch, "--length.steps", "2"]) == 0
    assert "96 records -> " in capsys.readouterr().out
