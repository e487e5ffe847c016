"""Sources of a checkpoint's tensors on a rank: with adapters merged, adapters only, or gradients."""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from automodel_rl.families.known import CheckpointFamily
from automodel_rl.hf.buckets import Source, whole_tensors
from automodel_rl.hf.names import pieces
from automodel_rl.hf.read import stored_buffers
from automodel_rl.lora.experts import adapted_stacks, adapter_of, merge_stack
from automodel_rl.lora.layers import adapted_layers, adapted_weights, is_adapter, merge
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.quantized.base import quantized_weights
from automodel_rl.quantized.linear import QuantizedLinear
from automodel_rl.quantized.weight import QuantizedWeight, is_quantized

Named = Iterable[tuple[str, nn.Parameter]]


def merged_sources(
    named: Named, parts: list[Any], dtype: torch.dtype, family: CheckpointFamily, layout: Layout
) -> list[Source]:
    """Returns sources of parameters, with adapters merged in fp32, and of stored buffers. A collective of each
    stage's ranks."""
    linears = {weight: linear for part in parts for weight, linear in adapted_weights(part)}
    downs = _whole_downs([linear for part in parts for linear in adapted_layers(part)], family, layout)
    adapted: dict[Tensor, Callable[[], Tensor]] = {
        weight: functools.partial(merge, linear, downs[linear]) for weight, linear in linears.items()
    }
    for part in parts:
        adapted |= {weight: functools.partial(merge_stack, *place) for weight, place in adapted_stacks(part)}
    sources = []
    for name, parameter in named:
        if parameter in adapted:
            sources.append(Source(name, parameter, dtype, adapted[parameter]))
        elif not is_adapter(name) and not is_quantized(name):
            sources.append(Source.of(name, parameter, dtype, is_frozen=not parameter.requires_grad))
    for part in parts:
        sources += [_quantized_source(*place, dtype, downs) for place in quantized_weights(part)]
    buffers = [named_buffer for part in parts for named_buffer in stored_buffers(part)]
    return sources + [Source.of(name, buffer, buffer.dtype) for name, buffer in buffers]


def _quantized_source(
    name: str, held: QuantizedWeight, module: nn.Module, dtype: torch.dtype, downs: dict[Any, Tensor]
) -> Source:
    """Returns the source of a quantized weight, dequantized and with any adapter merged. `downs` are the whole
    `lora_A` by linear layer."""
    in_module = name.rpartition(".")[2]
    read: Callable[[], Tensor] = held.values
    if module in downs:
        read = functools.partial(merge, module, downs[module])
    elif not isinstance(module, QuantizedLinear) and adapter_of(module, in_module) is not None:
        read = functools.partial(merge_stack, module, in_module, held.values)
    return Source(name, held.plain(), dtype, read, is_frozen=read == held.values)


def adapters_alone(named: Named, dtype: torch.dtype) -> list[Source]:
    """Returns sources of the adapters only, to be sent in `dtype`."""
    return [Source.of(name, parameter, dtype) for name, parameter in named if is_adapter(name)]


def gradient_sources(named: Named) -> list[Source]:
    """Returns sources of gradients, to be sent in the parameters' dtypes."""
    return [Source(name, p, p.dtype, functools.partial(_gradient, p)) for name, p in named]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Returns this rank's shard of a gradient; 0 for a parameter not used in the step."""
    gradient = parameter.grad
    return torch.zeros_like(local_tensor(parameter)) if gradient is None else local_tensor(gradient)


def _whole_downs(linears: Collection[Any], family: CheckpointFamily, layout: Layout) -> dict[Any, Tensor]:
    """Gathers the whole `lora_A` of each adapted layer."""
    weights = [linear.lora_A.weight for linear in linears]
    sources = [Source.of(str(number), weight, weight.dtype) for number, weight in enumerate(weights)]
    whole = dict(whole_tensors(sources, family, layout))
    names = [next(pieces(source.name, tuple(source.tensor.shape), family)).name for source in sources]
    return {linear: whole[name] for linear, name in zip(linears, names, strict=True)}
