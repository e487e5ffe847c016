"""Steps of optimizers that are written here: some rows at a time, compiled on CUDA, master weights of any dtype."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.compat.compilation import compile_for_any_size
from automodel_rl.few_bits.stochastic_rounding import hashed_rows, random_bits, round_to_bfloat16
from automodel_rl.optimizers.description import Named
from automodel_rl.parallel.sharding import local_box, local_tensor

MOST_VALUES = 1 << 24
"""Most values of which a step has results in full at a time."""

ENDS = ("model.embed_tokens.weight", "lm_head.weight")
"""Names of embedding and head in a part."""

Noise = tuple[Tensor, Tensor] | None
"""Hashes of rows, int32 [rows, 1], and places in them, int32 [I], for weights in bfloat16; None for wider ones."""


StepOfRows = Callable[..., None]
"""A step of some rows, in place: of their weight, gradient and state, each [rows, ...], with a noise and numbers."""


def numbers_of(group: dict[str, Any], steps: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """AdamW's numbers for a step, as a tensor [8], since a compiler makes a graph for each number that is none: the
    weight's factor, rate, each beta and 1 less it, divisor of the second moment's root, and eps.

    Args:
        group: torch's parameter group.
        steps: number of steps with this one.
        device: the device of the result.
        dtype: its dtype.
    """
    beta1, beta2 = group["betas"]
    kept, divisor = 1 - group["lr"] * group["weight_decay"], (1 - beta2**steps) ** 0.5
    numbers = [kept, group["lr"] / (1 - beta1**steps), beta1, 1 - beta1, beta2, 1 - beta2, divisor, group["eps"]]
    return torch.tensor(numbers, dtype=dtype, device=device)


def step_in_parts(
    step: StepOfRows,
    parameter: nn.Parameter,
    state: Sequence[Tensor],
    place: tuple[int, str],
    numbers: Tensor,
    **others: Tensor,
) -> None:
    """Takes a step of this rank's shard of a parameter, some rows at a time.

    Args:
        step: a step of some rows.
        parameter: the parameter, with a gradient.
        state: its moments and their scales, cut as it is.
        place: number of steps with this one, and the parameter's name, by which random numbers are made.
        numbers: as of `numbers_of`.
        **others: what else the step needs, the same for all rows.
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
    for parts in zip(*(matrix.split(max(1, MOST_VALUES // weight.shape[-1])) for matrix in matrices), strict=True):
        if columns is None:
            step(*parts, noise=None, numbers=numbers, **others)
        else:
            step(*parts[:-1], noise=(parts[-1], columns), numbers=numbers, **others)


@functools.cache
def _compiled(step: StepOfRows) -> StepOfRows:
    return compile_for_any_size(step)


def write_weight(weight: Tensor, updated: Tensor, noise: Noise) -> None:
    """Puts updated values in a weight's place, rounded stochastically to bfloat16 if there is noise.

    Args:
        weight: [rows, I].
        updated: the same shape, in the dtype in which a step computes.
        noise: as `step_in_parts` gives it.
    """
    weight.copy_(updated if noise is None else round_to_bfloat16(updated, random_bits(*noise)))


def names_for_rounding(named: Named) -> dict[nn.Parameter, str]:
    """Names of parameters for their random numbers, the same on every layout. Embedding and head have none, so that the
    two copies of a tied weight that a pipeline has split are rounded alike."""
    return {parameter: "" if name in ENDS else name for name, parameter in named}
