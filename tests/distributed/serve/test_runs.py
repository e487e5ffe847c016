"""What one run does to itself stays with it: overflows, weights that are not finite, folders that cannot be made."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from automodel_rl import Engine, LoraConfig, ModelHandle, OptimizerConfig, ParallelConfig
from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.serve.messages import ForwardBackward, LossResult
from automodel_rl.serve.requests import AdamBody
from automodel_rl.serve.runs import Runs
from tests.distributed.serve.test_together import LOSSES, SHAPES, job
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

STEP = {"lr": 0.05}


def runs_in_fp32(folder: Path, sizes: dict[str, int]) -> Runs:
    model = ModelConfig(path=str(folder), dtype="float32", lora=LoraConfig(rank=8))
    handle = ModelHandle.from_pretrained(model, ParallelConfig(**sizes))
    runs = Runs(Engine(handle, OptimizerConfig(decay="constant")), 32)
    for run in "ac":
        runs.create(run, SHAPES[run])
    return runs


def refused(work: Any) -> str:
    """Why this rank refused some work."""
    try:
        work()
    except InputError as error:
        return str(error)
    return "it was done"


def overflowing(one: ForwardBackward) -> ForwardBackward:
    data = [dataclasses.replace(d, inputs={**d.inputs, "weights": np.full(len(d), 3e38, np.float32)}) for d in one.data]
    return dataclasses.replace(one, data=data)


def meet_one_that_overflows(folder: Path, sizes: dict[str, int]) -> tuple[Any, Any]:
    found = []
    for meet in (False, True):
        runs = runs_in_fp32(folder, sizes)
        jobs = [overflowing(job("a", 1, LOSSES)), job("c", 1, LOSSES)]
        results: list[Any] = runs.together(jobs) if meet else [runs.forward_backward(one) for one in jobs]
        assert all(isinstance(one, LossResult) for one in results)
        found.append((results[1].loss, [runs.optimizer_step(run, STEP) for run in "ac"]))
    return found[0], found[1]


def test_a_run_that_overflows_spoils_no_other_in_the_same_pass(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    for alone, together in ranks(2).run(meet_one_that_overflows, tmp_path, {"pp": 2}):
        assert together == alone
        assert together[1][0] == {"skipped:max": 1.0}
        assert together[1][1]["skipped:max"] == 0


def break_a_run(folder: Path, sizes: dict[str, int]) -> list[str]:
    runs = runs_in_fp32(folder, sizes)
    runs.forward_backward(job("a", 1, LOSSES))
    ruin = {"lr": 1e20, "weight_decay": 1e20}
    said = [refused(lambda: runs.optimizer_step("a", ruin))]
    said += [refused(lambda: runs.keep("a", "k")), refused(lambda: runs.save("a", folder / "broken", True, {}))]
    blocked = folder / "file" / "run"
    said += [refused(lambda: runs.save("c", blocked, True, {})), refused(lambda: runs.save("c", blocked, False, {}))]
    assert not (folder / "broken").exists()
    runs.forward_backward(job("c", 1, LOSSES))
    assert runs.optimizer_step("c", STEP)["skipped:max"] == 0
    runs.save("c", folder / "good", True, {})
    runs.load("c", SHAPES["c"], folder / "good", with_optimizer=True)
    return said


def test_weights_that_are_not_finite_and_folders_that_cannot_be_made_are_refused_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    (tmp_path / "file").write_text("in the way")
    for said in ranks(2).run(break_a_run, tmp_path, {"pp": 2}):
        step, kept, saved, *blocked = said
        assert step.startswith("this optimizer step has made weights that are NaN or infinite")
        assert kept == saved
        assert saved.startswith("the run has weights that are NaN or infinite")
        assert all("the weights cannot be saved" in one and "file" in one for one in blocked)


def at_the_limits(folder: Path) -> list[dict[str, float]]:
    runs = runs_in_fp32(folder, {})
    largest = AdamBody(learning_rate=1e6, beta1=0.999999, beta2=0.999999, eps=1e-30, weight_decay=1e6)
    smallest = AdamBody(learning_rate=0, beta1=0, beta2=0, eps=1e6, grad_clip_norm=1e-30)
    clipped = largest.model_copy(update={"weight_decay": 0.0, "grad_clip_norm": 1e30})
    found = []
    for body in (smallest, clipped, largest):
        runs.forward_backward(job("c", 1, LOSSES))
        found.append(runs.optimizer_step("c", body.settings))
        runs.create("c", SHAPES["c"])
    return found


def test_every_setting_of_adamw_at_its_limit_is_computed_in_fp32(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    (found,) = ranks(1).run(at_the_limits, tmp_path)
    assert [step["skipped:max"] for step in found] == [0, 0, 0]
    assert torch.tensor([step["grad_norm:mean"] for step in found]).isfinite().all()
