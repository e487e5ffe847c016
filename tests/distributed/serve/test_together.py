"""Runs that meet in one pass: each gets what it gets alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from automodel_rl import LoraConfig, ModelHandle, ParallelConfig, Policy
from automodel_rl.batch import Packing
from automodel_rl.config import ModelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.policy.crew import TreeCrew
from automodel_rl.rollout.sampled import Refused
from automodel_rl.serve.messages import Datum, LossResult, RunPass, RunShape
from automodel_rl.serve.passes import Passes
from automodel_rl.serve.runs import RUNS
from automodel_rl.serve.service_rank import SERVICE, ServiceRank
from tests.distributed.model.test_compiled import traced_only
from tests.rank_pool import RankPool
from tests.tiny import VOCAB, save_tiny_model

SHAPES = {"a": RunShape(2, seed=1), "b": RunShape(3, seed=2, first=2), "c": RunShape(1, seed=3, mlp=False, first=7)}
LOSSES: dict[str, tuple[str, dict[str, float], int]] = {
    "a": ("cross_entropy", {}, 0),
    "b": ("ppo", {"clip_low_threshold": 0.9}, 0),
    "c": ("dro", {"beta": 0.2}, 0),
}
"""The loss of each run, its settings, and the number of targets of a token; 0 for one."""

SOFT = LOSSES | {"a": ("cross_entropy", {}, 3)}
ALL_SOFT = {run: ("cross_entropy", {}, width) for run, width in (("a", 3), ("b", 0), ("c", 2))}
LENGTHS = {"a": (7, 21, 3), "b": (12, 1), "c": (9, 30, 2, 5)}
NUMBERS = {"rtol": 1e-9, "atol": 1e-12}


def job(run: str, call: int, losses: dict[str, Any], forward_only: bool = False) -> RunPass:
    random = np.random.default_rng([call, *run.encode()])
    loss, settings, width = losses[run]
    names = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    data = []
    for length in LENGTHS[run]:
        shape = (length, width) if width else (length,)
        inputs = {name: (random.normal(size=shape) * 0.3 - 5 * (name == "logprobs")) for name in names}
        values = {name: value.astype(np.float32) for name, value in inputs.items()}
        targets = random.integers(0, VOCAB, shape)
        data.append(Datum(random.integers(0, VOCAB, length), {"target_tokens": targets, **values}))
    return RunPass(run, loss, settings, data, forward_only, SHAPES[run])


class Leader:
    """Runs of a service without a server, which rank 0 leads."""

    def __init__(self, crew: TreeCrew, rank: ServiceRank, capacity: int = 32):
        handle = rank.policy.handle
        parallel = handle.layout.parallel
        packing = Packing(capacity, parallel.num_data_ranks, parallel.pp, cost=handle.flops)
        self.crew, self.rank = crew, rank
        self.policy = Policy(crew, packing, handle.config.vocab_size)
        self.policy.begin()
        self.restart()

    def restart(self) -> None:
        """Forgets all runs."""
        self.crew.ask(SERVICE, "open_runs")
        self.passes = Passes(self.policy, self.rank.runs)

    def ask(self, run: str, method: str, *arguments: Any) -> Any:
        return self.crew.ask(RUNS, method, run, *arguments)

    def optimizer_step(self, run: str, settings: dict[str, Any]) -> dict[str, float]:
        return self.ask(run, "optimizer_step", settings)


def lead(handle: ModelHandle, program: Any) -> Any:
    """What a program on rank 0 finds out; other ranks answer its calls, and return it, too."""
    rank = ServiceRank(handle, None)  # type: ignore[arg-type]  # nothing is written
    crew = TreeCrew(handle.layout, rank.targets)
    if crew.rank:
        return crew.follow()
    try:
        found = program(Leader(crew, rank))
    except BaseException as error:
        crew.end(error)
        raise
    crew.end(value=found)
    return found


def train(runs: Leader, losses: dict[str, Any], meet: bool) -> dict[str, Any]:
    """Two optimizer steps of two calls each of every run. What each run got, and its state in the end."""
    found: dict[str, Any] = {run: [] for run in SHAPES}
    for run, shape in SHAPES.items():
        runs.ask(run, "create", shape)
    for step in range(2):
        for call in range(2):
            asked = [job(run, 10 * step + call, losses) for run in SHAPES]
            passes = runs.passes
            results = passes.combined_pass(asked) if meet else [passes.forward_backward(one) for one in asked]
            only = [job(run, 99, losses, forward_only=True) for run in SHAPES]
            results += passes.combined_pass(only) if meet else [passes.forward_backward(one) for one in only]
            for one, result in zip([*asked, *only], results, strict=True):
                assert isinstance(result, LossResult)
                found[one.run] += [result.loss, *(torch.from_numpy(values) for values in result.logprobs)]
        for run in SHAPES:
            found[run].append(runs.optimizer_step(run, {"lr": 0.05, "weight_decay": 0.1})["grad_norm:mean"])
    for run in SHAPES:
        runs.ask(run, "keep", run)
        found[run].append(runs.rank.runs._kept[run][1].weights)
    return found


def bidirectional(
    folder: Path, sizes: dict[str, Any], options: dict[str, Any], losses: dict[str, Any]
) -> tuple[Any, Any]:
    lora = LoraConfig(rank=8, targets=("q_proj", "o_proj", "gate_proj", "down_proj"))
    model = ModelConfig(path=str(folder), dtype="float64", lora=lora)
    handle = ModelHandle.from_pretrained(model, ParallelConfig(**sizes), MemoryConfig(**options))

    def program(runs: Leader) -> tuple[Any, Any]:
        alone = train(runs, losses, False)
        runs.restart()
        return alone, train(runs, losses, True)

    return lead(handle, program)


@pytest.mark.parametrize(
    ("sizes", "options", "losses"),
    [
        ({}, {}, LOSSES),
        ({"pp": 2}, {"activation_checkpointing": "full"}, LOSSES),
        ({"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2}, {}, dict.fromkeys(SHAPES, LOSSES["a"])),
        ({"dp_shard": 2}, {}, LOSSES),
        ({"tp": 2, "sequence_parallel": True}, {}, LOSSES),
        ({"dp_shard": 2}, {}, SOFT),
        ({"cp": 2}, {}, ALL_SOFT),
        ({"cp": 2}, {"activation_checkpointing": "selective"}, LOSSES),
    ],
)
def test_runs_that_meet_get_what_they_get_alone(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, Any], options: dict[str, Any], losses: dict[str, Any]
) -> None:
    save_tiny_model(tmp_path, num_layers=4)
    size = 2 if sizes else 1
    for alone, together in ranks(size).run(bidirectional, tmp_path, sizes, options, losses):
        torch.testing.assert_close(together, alone, **NUMBERS)
        norms = [value for value in alone["a"] if isinstance(value, float)]
        assert len({round(norm, 9) for norm in norms}) > 2, "each call has numbers of its own"


def compiled(folder: Path, in_one_graph: bool) -> tuple[Any, Any]:
    with traced_only(in_one_graph):
        return bidirectional(folder, {}, {"compile": True, "activation_checkpointing": "full"}, LOSSES)


@pytest.mark.parametrize("in_one_graph", [True, False])
def test_compiled_layers_take_each_microbatchs_gate(ranks: RankPool, tmp_path: Path, in_one_graph: bool) -> None:
    """Also where attention breaks the graph, so that the recomputation is no part of it."""
    save_tiny_model(tmp_path, num_layers=4)
    ((alone, together),) = ranks(1).run(compiled, tmp_path, in_one_graph)
    torch.testing.assert_close(together, alone, **NUMBERS)


def with_one_gone(folder: Path) -> tuple[list[bool], float, float]:
    model = ModelConfig(path=str(folder), dtype="float64", lora=LoraConfig(rank=8))
    return lead(ModelHandle.from_pretrained(model), find_one_gone)


def find_one_gone(runs: Leader) -> tuple[list[bool], float, float]:
    runs.ask("a", "create", SHAPES["a"])
    runs.ask("c", "create", SHAPES["c"])
    results = runs.passes.combined_pass([job(run, 1, LOSSES) for run in SHAPES])
    alone = [runs.passes.forward_backward(job(run, 1, LOSSES)) for run in "ac"]
    expected = [result.loss for result in alone]
    found = [result.loss for result in results if isinstance(result, LossResult)]
    assert found == pytest.approx(expected, rel=1e-9)
    return [isinstance(result, Refused) for result in results], *found


def test_a_run_that_is_gone_is_refused_alone(ranks: RankPool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    ((refused, *losses),) = ranks(1).run(with_one_gone, tmp_path)
    assert refused == [False, True, False]
    assert all(losses)
