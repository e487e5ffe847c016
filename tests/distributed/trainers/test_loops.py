"""Programs of one's own: those of configs/loops, and what a file must have."""

import sys
from pathlib import Path

import pytest

from automodel_rl.cli import main
from tests.distributed.trainers.runs import metrics_of, settings_of, train, write
from tests.pages import ROOT
from tests.processes import run_command
from tests.rank_pool import RankPool


def run(loop: Path, config: str, *options: str) -> int:
    ran = run_command([sys.executable, "-m", "automodel_rl", "run", str(loop), "--config", config, *options])
    print(ran.stdout, ran.stderr)
    return ran.returncode


@pytest.mark.parametrize("name", ["reinforce", "best_of_n", "online_dpo"])
def test_the_loops_of_the_examples_learn_and_on_two_ranks_as_on_one(workspace: Path, tmp_path: Path, name: str) -> None:
    found = []
    for number, parallel in enumerate(({}, {"dp_shard": 2})):
        settings = settings_of("grpo", workspace, tmp_path / f"run{number}", parallel=parallel, length={"steps": 10})
        settings |= {"optimizer": {"lr": 3e-3, "decay": "constant"}, "weight_sync": {"check_every": 0}}
        settings["batch"] = {"microbatch_tokens": 256}  # a pair stays together
        assert run(ROOT / "configs" / "loops" / f"{name}.py", write(settings, tmp_path)) == 0
        found.append(metrics_of(tmp_path / f"run{number}"))
        assert (tmp_path / f"run{number}" / "final" / "config.json").is_file()
    for one, two in zip(*found, strict=True):
        for key in ("train/loss", "train/grad_norm", "rollout/reward_mean"):
            assert one[key] == pytest.approx(two[key], rel=1e-8), key
    rewards = [row["rollout/reward_mean"] for row in found[0]]
    assert sum(rewards[-3:]) > 1.2 * sum(rewards[:3])


@pytest.mark.parametrize("name", ["self_distillation", "mixed_distillation"])
def test_loops_that_distil_do_so_on_two_ranks_as_on_one(
    ranks: RankPool, workspace: Path, tmp_path: Path, name: str
) -> None:
    tuned = settings_of("sft", workspace, tmp_path / "tuned", length={"steps": 10})
    tuned["optimizer"] = {"lr": 3e-3, "warmup_steps": 2}
    ranks(1).run(train, tuned)
    found = []
    for number, parallel in enumerate(({}, {"dp_shard": 2})):
        settings = settings_of("grpo", workspace, tmp_path / f"run{number}", parallel=parallel, length={"steps": 12})
        lr = 3e-4 if name == "self_distillation" else 1e-3
        settings |= {"optimizer": {"lr": lr, "decay": "constant"}, "weight_sync": {"check_every": 0}}
        settings["batch"] = {"microbatch_tokens": 256}
        settings["rollout"] |= {"prompts": 8}
        if name == "self_distillation":
            settings["model"]["path"] = str(tmp_path / "tuned" / "final")
        else:
            settings["teachers"] = {"large": {"path": str(tmp_path / "tuned" / "final")}}
        assert run(ROOT / "configs" / "loops" / f"{name}.py", write(settings, tmp_path)) == 0
        found.append([row["train/divergence"] for row in metrics_of(tmp_path / f"run{number}")])
    assert found[1] == pytest.approx(found[0], rel=1e-7)
    assert sum(found[0][-3:]) < 0.8 * sum(found[0][:3])


OWN = """
from automodel_rl import Batch, Goal, LossOutput, TokenSequence, run_program
import torch

class Doubled:
    def __call__(self, outputs, microbatch):
        return LossOutput({"tokens": -2 * torch.where(microbatch.loss_mask, outputs.logprobs, 0.0).sum()})

def main(policy, fleet, run):
    policy.begin()
    run.resume(Goal(2), {})
    rows = Batch(TokenSequence(torch.arange(5, 5 + n), torch.ones(n, dtype=torch.bool)) for n in (3, 7, 4))
    for step in run.steps("three rows"):
        outputs = [policy.train_step(rows, loss) for loss in (Doubled(), lambda *given: Doubled()(*given))]
        step.record(outputs, policy.size(rows))
    return run.finish()
"""


def test_losses_of_a_programs_own_file_go_to_all_ranks(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "own_loop.py").write_text(OWN)
    (tmp_path / "json.py").write_text("raise RuntimeError('this file beside the program is not the json of Python')")
    losses = []
    for number, parallel in enumerate(({}, {"dp_shard": 2})):
        config = write(settings_of("sft", workspace, tmp_path / f"run{number}", parallel=parallel), tmp_path)
        assert run(tmp_path / "own_loop.py", config, "--model.dtype", "float64") == 0
        losses.append([row["train/loss"] for row in metrics_of(tmp_path / f"run{number}")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "file not found"),
        ("without.py", "x = 1", "has no function main(policy, fleet, run)"),
        ("short.py", "def main(policy): pass", "main cannot be called as main(policy, fleet, run)"),
        ("broken.py", "import nowhere_at_all", "cannot be imported (ModuleNotFoundError: No module named 'nowhere_at"),
        ("json.py", "def main(policy, fleet, run): pass", "Python has another module named json: rename the file"),
        ("a-b.py", "def main(policy, fleet, run): pass", "its name is not a valid Python module name"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_files_that_are_no_program_are_refused(
    workspace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str | None,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    if text is not None:
        (tmp_path / name).write_text(text)
    config = write(settings_of("sft", workspace, tmp_path / "run"), tmp_path)
    assert main(["run", str(tmp_path / name), "--config", config]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "run").exists()


def test_run_needs_a_file_and_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", "x.yaml"]) == 2
    assert main(["run", "loop.py"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "run takes a file with a function main first" in first
    assert "needs --config CONFIG.yaml" in second
