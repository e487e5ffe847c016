"""One parity case: five clipped AdamW steps on a layout against the reference, compared after every step."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from automodel_rl.batch import PackedBatch, empty_row, local_row, pack_row
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import count, sft_loss
from automodel_rl.model import ModelHandle
from automodel_rl.parallel.host_reduce import sum_over_data_ranks
from automodel_rl.parallel.sharding import gather_whole
from tests.reference import Reference
from tests.tiny import make_sequences

LR, MAX_GRAD_NORM = 1e-3, 0.5


@dataclass(frozen=True)
class Case:
    """What is compared; `rows` is the number of microbatches in each step on every data rank."""

    parallel: ParallelConfig
    rows: tuple[int, ...] = (3, 1, 4, 2, 7)
    dtype: str = "float64"
    implementation: str = "transformers"


@dataclass
class Differences:
    """Largest difference of every kind, relative to the largest entry of the reference's tensor or to the number.

    `loss`, `norm`, `gradient` of the first step and of any step; `weight` is absolute.
    """

    first_loss: float = 0.0
    first_norm: float = 0.0
    first_gradient: float = 0.0
    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    logprob: float = 0.0
    weight: float = 0.0

    def note(self, kind: str, difference: float, first: bool = False) -> None:
        difference = float("inf") if difference != difference else difference
        for name in (kind, f"first_{kind}") if first else (kind,):
            setattr(self, name, max(getattr(self, name), difference))


def compare(case: Case, folder: Path, fault: str | None = None) -> Differences:
    """Runs on every rank of a pool; returns this rank's largest differences."""
    with planted(fault):
        return _compare(case, folder)


def _compare(case: Case, folder: Path) -> Differences:
    model = ModelConfig(path=str(folder), dtype=case.dtype, implementation=case.implementation)
    handle = ModelHandle.from_pretrained(model, case.parallel)
    engine = Engine(handle, OptimizerConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM, decay="constant"))
    reference = Reference(folder, getattr(torch, case.dtype), LR, MAX_GRAD_NORM, handle.layout.device)
    found = Differences()
    for step, num_rows in enumerate(case.rows):
        of_ranks = [
            [make_sequences(1 + (m + rank) % 3, seed=1000 * step + 100 * rank + m) for m in range(num_rows)]
            for rank in range(case.parallel.num_data_ranks)
        ]
        mine = of_ranks[handle.layout.data_rank]
        rows = [pack_row(sequences) for sequences in mine]
        if step == len(case.rows) - 1:
            rows.append(empty_row())
        first = step == 0
        with torch.no_grad():
            expected_logprobs = [reference.logprobs(s) for row in mine for s in row]
        for actual, expected in zip(engine.logprobs(rows), expected_logprobs, strict=True):
            found.note("logprob", _largest(actual, expected))
        loss = reference.backward([s for rank in of_ranks for row in rank for s in row])
        _compare_gradients(handle, rows, reference, found, first)
        output = engine.train_step(rows, sft_loss)
        norm = reference.step()
        found.note("loss", abs(output.loss - loss) / abs(loss), first)
        found.note("norm", abs(output.grad_norm - norm) / norm, first)
        weights = reference.weights()
        for part in handle.parts:
            for name, parameter in part.named_parameters():
                found.note("weight", _largest(_whole(parameter.detach()), weights[name]))
    return found


def _compare_gradients(
    handle: ModelHandle, rows: list[PackedBatch], reference: Reference, found: Differences, first: bool
) -> None:
    local = count(rows)
    counts = dict(zip(local, sum_over_data_ranks(list(local.values()), handle.layout), strict=True))
    handle.forward_backward(rows, sft_loss, counts)
    expected = reference.gradients()
    for part in handle.parts:
        for name, parameter in part.named_parameters():
            difference = _largest(_whole(parameter.grad), expected[name])
            found.note("gradient", difference / expected[name].abs().max().item(), first)
    handle.zero_grad()


def _whole(tensor: Tensor) -> Tensor:
    return gather_whole(tensor)


def _largest(actual: Tensor, expected: Tensor) -> float:
    return (actual - expected).abs().max().item()


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Puts a known bug into the package for the length of a comparison."""
    if fault is None:
        yield
        return
    from automodel_rl.engine import engine
    from automodel_rl.model import handle
    from automodel_rl.parallel import sharding
    from automodel_rl.parallel.gradients import TiedEmbedding, local_square_norm
    from automodel_rl.parallel.layout import Layout

    def norm_of_last_stage(parameters: list, layout: Layout) -> Tensor:
        return local_square_norm(parameters, layout) * layout.has_last_stage

    def one_document(row: PackedBatch, *place: int) -> object:
        merged = local_row(dataclasses.replace(row, lengths=(row.num_tokens,)), *place)
        return dataclasses.replace(merged, position_ids=local_row(row, *place).position_ids)

    faults = {
        "documents see each other": mock.patch.object(handle, "local_row", one_document),
        "tied gradient counted once": mock.patch.object(TiedEmbedding, "sum_gradients", return_value=None),
        "mean over data ranks": mock.patch.object(sharding, "sum_fsdp_gradients", return_value=None),
        "local token counts": mock.patch(
            "automodel_rl.engine.engine.sum_over_data_ranks", lambda numbers, layout: numbers
        ),
        "norm of one stage": mock.patch.object(engine, "local_square_norm", norm_of_last_stage),
    }
    with faults[fault]:
        yield
