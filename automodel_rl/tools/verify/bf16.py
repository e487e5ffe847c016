"""Compares one bf16 step, with the kernels and compiled layers of a real run, against float64.

bf16 errors grow with model depth, so no fixed tolerance fits all models. Plain transformers in bf16 sets the scale:
the layout's error may be twice as large.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from automodel_rl.batch import TokenSequence
from automodel_rl.config import ModelConfig
from automodel_rl.config.model import MemoryConfig
from automodel_rl.engine import Engine
from automodel_rl.losses import Readout, sft_loss
from automodel_rl.model.handle import ModelHandle
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.sharding import gather_whole
from automodel_rl.tools.verify.comparison import Case, counted, microbatches_of, model_of, packed
from automodel_rl.tools.verify.one_process import OneProcess

ALLOWED = 2.0
"""Largest error that counts as rounding, as a multiple of that of plain transformers in bf16."""

LEAST = {"log-probabilities": 0.02, "loss": 0.005, "gradients": 0.03, "worst gradient": 0.06}
"""Error that always counts as rounding, as plain transformers may be accurate by chance."""

MIN_SHARE = 1e-3
"""Tensors with a smaller share of the gradient norm are not judged individually."""

Squares = tuple[float, float]
"""Squared norms of a difference and of the exact values."""


@dataclass(frozen=True)
class Numbers:
    """Values that are compared.

    Attributes:
        logprobs: one tensor [n] for each sequence of this data rank.
        gradients: by parameter name.
    """

    logprobs: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def compare_bf16(case: Case, memory: MemoryConfig, model: ModelConfig, folder: Path) -> dict[str, tuple[float, float]]:
    """Runs one step in bf16 on the layout, and in bf16 and float64 in one process. A collective.

    Args:
        case: only its layout, auxiliary-loss weight and optimizer matter here.
        memory: the run's section, with its compilation setting.
        model: the run's section, with its attention setting.
        folder: the small checkpoint.

    Returns:
        By kind, the layout's error relative to the exact values, and the tolerance.
    """
    asked = model_of(case, folder).model_copy(update={"dtype": "bfloat16", "attention": model.attention})
    with ModelHandle.from_pretrained(asked, case.parallel, memory) as handle:
        return _compared(handle, case, folder)


def _compared(handle: ModelHandle, case: Case, folder: Path) -> dict[str, tuple[float, float]]:
    layout, ranks = handle.layout, range(handle.layout.parallel.num_data_ranks)
    # Tokens of a mixture follow fixed routes: rounding may change a router's choice, which is not an error.
    of_ranks = [microbatches_of(0, rank, 3, handle, replay=True) for rank in ranks]
    mine = of_ranks[layout.data_rank]
    everywhere = [microbatch for rank in of_ranks for microbatch in rank if microbatch]
    exact, plain = (
        _in_one_process(OneProcess(folder, dtype, case.training, layout.device), mine, everywhere)
        for dtype in (torch.float64, torch.bfloat16)
    )
    errors = {
        "plain": _errors(handle, plain, exact),
        "layout": _errors(handle, _on_layout(handle, case, mine, everywhere), exact),
    }
    return {
        kind: (error, max(LEAST[kind], ALLOWED * errors["plain"][kind])) for kind, error in errors["layout"].items()
    }


Sequences = list[list[TokenSequence]]


def _in_one_process(model: OneProcess, mine: Sequences, everywhere: Sequences) -> Numbers:
    with torch.no_grad():
        logprobs = [model.logprobs(sequence) for microbatch in mine for sequence in microbatch]
    loss = model.backward(everywhere)
    return Numbers(logprobs, loss, model.gradients())


def _on_layout(handle: ModelHandle, case: Case, mine: Sequences, everywhere: Sequences) -> Numbers:
    engine = Engine(handle, case.training.config, case.training.total_steps)
    microbatches = packed(mine)
    logprobs = engine.logprobs(microbatches)
    engine.runner.forward_backward(microbatches, sft_loss, Readout(), counted(everywhere))
    gradients = {
        name: gather_whole(torch.zeros_like(p) if p.grad is None else p.grad, component.layout)
        for component in handle.components
        for name, p in component.every_parameter()
        if p.requires_grad
    }
    handle.zero_grad()
    return Numbers(logprobs, engine.evaluate(microbatches, sft_loss)[0], gradients)


def _errors(handle: ModelHandle, found: Numbers, exact: Numbers) -> dict[str, float]:
    """Relative errors by kind, over all ranks. A collective."""
    gradients = {name: _squares(gradient, exact.gradients[name]) for name, gradient in found.gradients.items()}
    logprobs = [_squares(ours, right) for ours, right in zip(found.logprobs, exact.logprobs, strict=True)]
    of_ranks = gather_objects((logprobs, gradients), handle.layout.world_control)
    every = {name: squares for _, of_rank in of_ranks for name, squares in of_rank.items()}
    return {
        "log-probabilities": _relative([squares for of_rank, _ in of_ranks for squares in of_rank]),
        "loss": abs(found.loss - exact.loss) / abs(exact.loss),
        "gradients": _relative(every.values()),
        "worst gradient": max(_relative([squares]) for squares in _above_rounding(every)),
    }


def _above_rounding(squares: dict[str, Squares]) -> list[Squares]:
    """Drops tensors whose gradient is only rounding, such as a bias that a softmax cancels."""
    total = sum(exact for _, exact in squares.values())
    return [(difference, exact) for difference, exact in squares.values() if exact > MIN_SHARE**2 * total]


def _squares(found: Tensor, exact: Tensor) -> Squares:
    exact = exact.double()
    return (found.double() - exact).square().sum().item(), exact.square().sum().item()


def _relative(squares: Iterable[Squares]) -> float:
    differences, exact = map(sum, zip(*squares, strict=True))
    return float(differences / exact) ** 0.5
