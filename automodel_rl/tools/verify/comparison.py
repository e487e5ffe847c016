"""A layout against one process: the same packed batches through both, and the largest differences of every kind."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from automodel_rl.batch import PackedBatch, TokenSequence, empty_row, pack_row
from automodel_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from automodel_rl.config.attention import Attention
from automodel_rl.config.memory import MemoryConfig
from automodel_rl.config.model import Dtype, Implementation
from automodel_rl.config.modules import ModulesConfig
from automodel_rl.engine import Engine
from automodel_rl.engine.reference_weights import ReferenceWeights
from automodel_rl.losses import Readout, count, sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.sharding import gather_whole
from automodel_rl.tools.verify.images import with_images
from automodel_rl.tools.verify.one_process import OneProcess
from automodel_rl.tools.verify.routes import RouteCheck, with_routes

LR, MAX_GRAD_NORM = 1e-3, 0.5


@dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
        parallel: the layout.
        rows: number of microbatches in each step on every data rank; the last step has an empty row besides.
        dtype, implementation, attention: of the model.
        memory: what is recomputed or offloaded.
        replay: tokens of a mixture follow routes.
        modules: in place of `parallel`, meshes for the modules of a vision-language model.
        frozen: parts of it that are not trained.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rows: tuple[int, ...] = (3, 1, 4)
    dtype: Dtype = "float64"
    implementation: Implementation = "transformers"
    attention: Attention = "auto"
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    replay: bool = False
    modules: ModulesConfig | None = None
    frozen: tuple[str, ...] = ()


@dataclass
class Differences:
    """Largest difference of every kind, relative to the number or to the largest entry of its tensor.

    Attributes:
        first: of the first step alone, before rounding can grow over updates.
        all: of every step; "weights", "exported tensors" and "reference log-probabilities" are absolute, "choices of
            experts" is how many were not the route's.
    """

    first: dict[str, float] = field(default_factory=dict)
    all: dict[str, float] = field(default_factory=dict)

    def note(self, kind: str, difference: float, first: bool = False) -> None:
        difference = float("inf") if difference != difference else difference
        for found in (self.all, self.first) if first else (self.all,):
            found[kind] = max(found.get(kind, 0.0), difference)

    def merge(self, others: Sequence["Differences"]) -> "Differences":
        for other in others:
            for kind, difference in other.all.items():
                self.note(kind, difference)
            for kind, difference in other.first.items():
                self.note(kind, difference, first=True)
        return self


def make_sequences(num_sequences: int, seed: int, vocab_size: int, longest: int = 18) -> list[TokenSequence]:
    """Random sequences of different lengths with random loss masks, at least one trained token in each."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(num_sequences):
        length = int(torch.randint(3, longest, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.7
        mask[-1] = True
        sequences.append(TokenSequence(torch.randint(0, vocab_size, (length,), generator=generator), mask))
    return sequences


def compare(case: Case, folder: Path, scratch: Path) -> Differences:
    """Trains on the layout and in one process, and compares after every step. A collective.

    Args:
        case: what is compared.
        folder: of the checkpoint.
        scratch: a folder that all ranks share, for the export.

    Returns:
        The largest differences on any rank.
    """
    model = ModelConfig.model_validate(
        {
            "path": str(folder),
            "dtype": case.dtype,
            "implementation": case.implementation,
            "attention": case.attention,
            "frozen": case.frozen,
        }
    )
    handle = ModelHandle.from_pretrained(model, case.parallel, case.memory, case.modules)
    engine = Engine(handle, OptimizerConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM, decay="constant"))
    expected = OneProcess(folder, handle.dtype, LR, MAX_GRAD_NORM, handle.layout.device)
    frozen = [name for name, parameter in handle.named_parameters() if not parameter.requires_grad]
    expected.freeze({name for of_rank in gather_objects(frozen, handle.layout.world_control) for name in of_rank})
    found = Differences()
    swap = _SwapCheck(engine)
    check = RouteCheck(handle) if case.replay else None
    for step, num_rows in enumerate(case.rows):
        ranks = range(handle.layout.parallel.num_data_ranks)
        of_ranks = [_rows_of(step, rank, num_rows, handle, case.replay) for rank in ranks]
        _compare_step(step, of_ranks, len(case.rows), engine, expected, found)
    if check is not None:
        found.note("choices of experts", check.num_wrong if check.num_right or not handle.router_layers else math.inf)
    found.note("reference log-probabilities", swap.largest_difference())
    _compare_export(handle, scratch, found)
    return Differences().merge(gather_objects(found, handle.layout.world_control))


def _rows_of(step: int, rank: int, num_rows: int, handle: ModelHandle, replay: bool) -> list[list[TokenSequence]]:
    """The sequences of a data rank's rows: other numbers and lengths on every rank and in every row."""
    vocab, shape = handle.config.vocab_size, handle.router_shape
    rows = [make_sequences(1 + (m + rank) % 3, 1000 * step + 100 * rank + m, vocab) for m in range(num_rows)]
    if handle.sees:
        rows = [
            [with_images(s, handle.whole_config, 7 * m + 5 * rank + n + step) for n, s in enumerate(row)]
            for m, row in enumerate(rows)
        ]
    if not replay or shape is None:
        return rows
    return [[with_routes(sequence, shape) for sequence in row] for row in rows]


def _compare_step(
    step: int,
    of_ranks: list[list[list[TokenSequence]]],
    num_steps: int,
    engine: Engine,
    expected: OneProcess,
    found: Differences,
) -> None:
    handle, first = engine.handle, step == 0
    mine = [] if handle.layout.is_guest else of_ranks[handle.layout.data_rank]
    rows = [pack_row(sequences) for sequences in mine]
    if step == num_steps - 1 and not handle.layout.is_guest:
        rows.append(empty_row())
    with torch.no_grad():
        logprobs = [expected.logprobs(sequence) for row in mine for sequence in row]
    for actual, right in zip(engine.logprobs(rows), logprobs, strict=True):
        found.note("log-probabilities", _largest(actual, right) / right.abs().max().item(), first)
    everywhere = [sequence for rank in of_ranks for row in rank for sequence in row]
    loss = expected.backward(everywhere)
    _compare_gradients(handle, rows, everywhere, expected, found, first)
    output = engine.train_step(rows, sft_loss)
    norm = expected.step()
    found.note("loss", abs(output.loss - loss) / abs(loss), first)
    found.note("gradient norm", abs(output.grad_norm - norm) / norm, first)
    weights = expected.weights()
    for module in handle.modules:
        for name, parameter in module.every_parameter():
            found.note("weights", _largest(gather_whole(parameter, module.layout), weights[name]))


def _compare_gradients(
    handle: ModelHandle,
    rows: list[PackedBatch],
    everywhere: list[TokenSequence],
    expected: OneProcess,
    found: Differences,
    first: bool,
) -> None:
    counts = count([pack_row(everywhere)])  # not by the engine, whose counts are under test, too
    handle.forward_backward(rows, sft_loss, Readout(), counts)
    right = expected.gradients()
    for module in handle.modules:
        for name, parameter in module.every_parameter():
            if not parameter.requires_grad:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            difference = _largest(gather_whole(gradient, module.layout), right[name])
            kind = re.sub(r"^model\.|(layers|blocks)\.\d+\.", "", name)
            # What takes no part, or a softmax does not notice, has nothing but rounding to be compared with.
            scale = max(right[name].abs().max().item(), LEAST_GRADIENT)
            found.note(f"gradient of {kind}", difference / scale, first)
    handle.zero_grad()


LEAST_GRADIENT = 1e-6
"""Largest entry of a gradient below which it counts as rounding; others are larger by orders of magnitude."""


class _SwapCheck:
    """Whether reference weights give the log-probabilities of the start again, in all parts, and go away after."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.rows = _one_row(engine.handle, seed=7)
        self.at_start = engine.logprobs(self.rows)
        self.reference = ReferenceWeights(engine.handle)

    def largest_difference(self) -> float:
        before = self.engine.logprobs(self.rows)
        with self.reference.in_place():
            swapped = self.engine.logprobs(self.rows)
        after = self.engine.logprobs(self.rows)
        pairs = [*zip(swapped, self.at_start, strict=True), *zip(after, before, strict=True)]
        return max((_largest(actual, right) for actual, right in pairs), default=0.0)


def _compare_export(handle: ModelHandle, scratch: Path, found: Differences) -> None:
    """The exported checkpoint, opened with transformers, against the log-probabilities of the trained model."""
    handle.save_pretrained(scratch / "exported")
    actual = Engine(handle).logprobs(_one_row(handle, seed=8))
    opened = OneProcess(scratch / "exported", handle.dtype, LR, MAX_GRAD_NORM, handle.layout.device)
    with torch.no_grad():
        for sequence, logprobs in zip(_two_sequences(handle, seed=8), actual, strict=bool(actual)):
            found.note("exported tensors", _largest(opened.logprobs(sequence), logprobs))


def _one_row(handle: ModelHandle, seed: int) -> list[PackedBatch]:
    """A row of two sequences, the same on every data rank; a guest has none."""
    return [] if handle.layout.is_guest else [pack_row(_two_sequences(handle, seed))]


def _two_sequences(handle: ModelHandle, seed: int) -> list[TokenSequence]:
    sequences = make_sequences(2, seed, handle.config.vocab_size)
    return [with_images(s, handle.whole_config, 1 + n) for n, s in enumerate(sequences)] if handle.sees else sequences


def _largest(actual: Tensor, expected: Tensor) -> float:
    return (actual - expected).abs().max().item()
