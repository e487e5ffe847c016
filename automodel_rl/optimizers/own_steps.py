"""Optimizer steps implemented here: processed in blocks of rows, compiled on CUDA, master weights of any dtype."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.optimizers.description import Named
from automodel_rl.parallel.sharding import local_box, local_tensor
from automodel_rl.quantized.stochastic_rounding import hashed_rows, random_bits, round_to_bfloat16

MAX_VALUES = 1 << 24
"""Maximum number of values for which a step holds unquantized results at a time."""

ENDS = ("model.embed_tokens.weight", "lm_head.weight")
"""Names of embedding and head in a part."""

Noise = tuple[Tensor, Tensor] | None
"""Hashes of rows, int32 [rows, 1], and column indices, int32 [I], for bfloat16 weights; None for wider ones."""


StepOfRows = Callable[..., None]
"""An in-place step of some rows: weight, gradient and state, each [rows, ...], with noise and numbers."""


def step_scalars(group: dict[str, Any], steps: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns AdamW's numbers for a step, [8]: the weight's factor, rate, each beta followed by 1 minus it, divisor
    of the second moment's root, and eps. A tensor, because the compiler would make a graph per value of a Python
    number.

    Args:
        steps: number of steps, this one included.
    """
    beta1, beta2 = group["betas"]
    kept, divisor = 1 - group["lr"] * group["weight_decay"], (1 - beta2**steps) ** 0.5
    numbers = [kept, group["lr"] / (1 - beta1**steps), beta1, 1 - beta1, beta2, 1 - beta2, divisor, group["eps"]]
    return torch.tensor(numbers, dtype=dtype, device=device)


def step_in_row_blocks(
    step: StepOfRows,
    parameter: nn.Parameter,
    state: Sequence[Tensor],
    place: tuple[int, str],
    numbers: Tensor,
    **others: Tensor,
) -> None:
    """Takes a step of this rank's shard of a parameter, in blocks of rows.

    Args:
        state: its moments and their scales, sharded alike.
        place: number of steps, this one included, and the parameter's name, which seed the random numbers.
        **others: additional arguments of `step`, the same for all rows.
    """
    weight = local_tensor(parameter.detach())
    if not weight.numel():  # a rank without rows
        return
    held = [weight, *(local_tensor(tensor) for tensor in (parameter.grad, *state) if tensor is not None)]
    matrices, columns = [tensor.view(-1, tensor.shape[-1]) for tensor in held], None
    if weight.dtype == torch.bfloat16:
        box = local_box(parameter)
        columns = torch.arange(box[-1].start, box[-1].stop, dtype=torch.int32, device=weight.device)
        matrices.append(hashed_rows(parameter.shape, box, *place, weight.device))
    if weight.is_cuda:
        step = _compiled(step)
    for parts in zip(*(matrix.split(max(1, MAX_VALUES // weight.shape[-1])) for matrix in matrices), strict=True):
        if columns is None:
            step(*parts, noise=None, numbers=numbers, **others)
        else:
            step(*parts[:-1], noise=(parts[-1], columns), numbers=numbers, **others)


@functools.cache
def _compiled(step: StepOfRows) -> StepOfRows:
    return compile_for_any_size(step)


def write_weight(weight: Tensor, updated: Tensor, noise: Noise) -> None:
    """Writes a step's result [rows, I] to a weight, rounded stochastically to bfloat16 if there is noise."""
    weight.copy_(updated if noise is None else round_to_bfloat16(updated, random_bits(*noise)))


def names_for_rounding(named: Named) -> dict[nn.Parameter, str]:
    """Returns the names that seed parameters' random numbers, equal on every layout. Embedding and head have none, so
    that the two copies of a tied weight in a pipeline are rounded alike."""
    return {parameter: "" if name in ENDS else name for name, parameter in named}
