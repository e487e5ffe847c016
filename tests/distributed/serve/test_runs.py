"""What one run does to itself stays with it: overflows, weights that are not finite, folders that cannot be made."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from automodel_rl import LoraConfig, ModelHandle, ParallelConfig
from automodel_rl.config import ModelConfig
from automodel_rl.errors import InputError
from automodel_rl.serve.messages import LossResult, RunPass
from automodel_rl.serve.requests import AdamBody
from tests.distributed.serve.test_together import LOSSES, SHAPES, Leader, job, lead
from tests.rank_pool import RankPool
from tests.tiny import save_tiny_model

STEP = {"lr": 0.05}


def lead_in_fp32(folder: Path, sizes: dict[str, int], program: Any) -> Any:
    model = ModelConfig(path=str(folder), dtype="float32", lora=LoraConfig(rank=8))
    return lead(ModelHandle.from_pretrained(model, ParallelConfig(**sizes)), functools.partial(program, folder))


def create(runs: Leader) -> None:
    runs.restart()
    for run in "ac":
        runs.ask(run, "create", SHAPES[run])


def refused(work: Any) -> str:
    """Why some work was refused."""
    try:
        work()
    except InputError as error:
        return str(error)
    return "it was done"


def overflowing(one: RunPass) -> RunPass:
    data = [dataclasses.replace(d, inputs={**d.inputs, "weights": np.full(len(d), 3e38, np.float32)}) for d in one.data]
    return dataclasses.replace(one, data=data)


def meet_one_that_overflows(folder: Path, runs: Leader) -> tuple[Any, Any]:
    found = []
    for meet in (False, True):
        create(runs)
        jobs = [overflowing(job("a", 1, LOSSES)), job("c", 1, LOSSES)]
        passes = runs.passes
        results: list[Any] = passes.combined_pass(jobs) if meet else [passes.forward_backward(one) for one in jobs]
        assert all(isinstance(one, LossResult) for one in results)
        found.append((results[1].loss, [runs.optimizer_step(run, STEP) for run in "ac"]))
    return found[0], found[1]


def test_a_run_that_overflows_spoils_no_other_in_the_same_pass(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    for alone, together in ranks(2).run(lead_in_fp32, tmp_path, {"pp": 2}, meet_one_that_overflows):
        assert together == alone
        assert together[1][0] == {"skipped:max": 1.0}
        assert together[1][1]["skipped:max"] == 0


def break_a_run(folder: Path, runs: Leader) -> list[str]:
    create(runs)
    runs.passes.forward_backward(job("a", 1, LOSSES))
    ruin = {"lr": 1e20, "weight_decay": 1e20}
    said = [refused(lambda: runs.optimizer_step("a", ruin))]
    for asked in (("keep", "k"), ("save", str(folder / "broken"), True, {})):
        said.append(refused(lambda: runs.ask("a", *asked)))  # noqa: B023
    for for_training in (True, False):
        save = ("save", str(folder / "file" / "run"), for_training, {})
        said.append(refused(lambda: runs.ask("c", *save)))  # noqa: B023
    assert not (folder / "broken").exists()
    runs.passes.forward_backward(job("c", 1, LOSSES))
    assert runs.optimizer_step("c", STEP)["skipped:max"] == 0
    runs.ask("c", "save", str(folder / "good"), True, {})
    runs.ask("c", "load", SHAPES["c"], str(folder / "good"), True)
    return said


def test_weights_that_are_not_finite_and_folders_that_cannot_be_made_are_refused_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    (tmp_path / "file").write_text("in the way")
    for said in ranks(2).run(lead_in_fp32, tmp_path, {"pp": 2}, break_a_run):
        step, kept, saved, *blocked = said
        assert step.startswith("this optimizer step produced weights that are NaN or infinite")
        assert kept == saved
        assert saved.startswith("the run has weights that are NaN or infinite")
        assert all("the weights cannot be saved" in one and "file" in one for one in blocked)


def at_the_limits(folder: Path, runs: Leader) -> list[dict[str, float]]:
    create(runs)
    largest = AdamBody(learning_rate=1e6, beta1=0.999999, beta2=0.999999, eps=1e-30, weight_decay=1e6)
    smallest = AdamBody(learning_rate=0, beta1=0, beta2=0, eps=1e6, grad_clip_norm=1e-30)
    clipped = largest.model_copy(update={"weight_decay": 0.0, "grad_clip_norm": 1e30})
    found = []
    for body in (smallest, clipped, largest):
        runs.passes.forward_backward(job("c", 1, LOSSES))
        found.append(runs.optimizer_step("c", body.settings))
        runs.ask("c", "create", SHAPES["c"])
    return found


def test_every_setting_of_adamw_at_its_limit_is_computed_in_fp32(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_layers=2)
    (found,) = ranks(1).run(lead_in_fp32, tmp_path, {}, at_the_limits)
    assert [step["skipped:max"] for step in found] == [0, 0, 0]
    assert torch.tensor([step["grad_norm:mean"] for step in found]).isfinite().all()
