"""Weights of decoder layers that make up a quantized base: frozen linear layers and stacks of experts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from automodel_rl.errors import InputError
from automodel_rl.lora.experts import EXPERTS
from automodel_rl.lora.layers import is_adapter, is_named
from automodel_rl.parallel.sharding import local_tensor
from automodel_rl.quantized import nf4
from automodel_rl.quantized.formats import FORMATS, QuantizedFormat
from automodel_rl.quantized.linear import QuantizedLinear
from automodel_rl.quantized.weight import HOLDER, QuantizedWeight

STAY_PLAIN = frozenset({"indexer", "gate", "router", "shared_expert_gate"})
"""Names of modules that are never quantized: they make choices, where small changes have large effects."""


def quantize_layers(layers: Mapping[int, nn.Module], base: Mapping[str, QuantizedFormat]) -> None:
    """Replaces weights of decoder layers, still without storage, by quantized ones, in place.

    Args:
        base: formats by weight name in the model; other weights stay plain.

    Raises:
        InputError: a weight is cut within a block.
    """
    for number, layer in layers.items():
        for path, module, name in list(_places(layer)):
            how = base.get(_name(number, path))
            if how is None:
                continue
            kept: Any = module
            weight = kept._parameters.pop(name)
            held, columns, block = (
                QuantizedWeight(weight, how),
                local_tensor(weight).shape[-1],
                FORMATS[how.format].block,
            )
            if columns != weight.shape[-1] and columns % block:
                raise InputError(
                    f"model.lora.base with parallel.tp: ranks have {columns} values of each row of "
                    f"{_name(number, path)}, which are not whole blocks of {block}: use base=plain, or another tp"
                )
            if isinstance(module, nn.Linear):
                vars(kept).pop("product", None)  # belongs to a split plain layer
                kept.__class__ = QuantizedLinear
                kept.quantized = held
                continue
            if HOLDER not in dict(kept.named_children()):
                kept.quantized = nn.ModuleDict()
            kept.quantized[name] = held


def all_in_nf4(weights: Iterable[tuple[str, Tensor]]) -> dict[str, QuantizedFormat]:
    """Returns a base of these weights, all in nf4.

    Raises:
        InputError: a weight's rows are not whole blocks.
    """
    kept = {}
    for name, weight in weights:
        if weight.shape[-1] % nf4.BLOCK:
            raise InputError(
                f"model.lora.base=nf4: {name} has rows of {weight.shape[-1]} values, which are not whole blocks of "
                f"{nf4.BLOCK}: use base=plain"
            )
        kept[name] = QuantizedFormat("nf4")
    return kept


def names_of_base(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields names and weights of a causal language model's base: the frozen ones among `weights_of_layers`."""
    return ((name, weight) for name, weight in weights_of_layers(model) if not weight.requires_grad)


def weights_of_layers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields names and weights of linear layers and stacks of experts in a causal language model's decoder layers,
    without `STAY_PLAIN` and the MTP layer. All are plain."""
    for number, layer in enumerate(model.model.layers[: model.config.num_hidden_layers]):
        for path, module, name in _places(layer):
            yield _name(number, path), getattr(module, name)


def _name(number: int, path: str) -> str:
    return f"model.layers.{number}.{path}"


def quantized_weights(part: nn.Module) -> Iterator[tuple[str, QuantizedWeight, nn.Module]]:
    """Yields a part's quantized weights by the names of the plain ones, with the modules that use them."""
    modules = dict(part.named_modules())
    for path, held in modules.items():
        if isinstance(held, QuantizedWeight):
            owner, _, name = path.rpartition(f".{HOLDER}")
            yield f"{owner}{name or '.weight'}", held, modules[owner]


def _places(layer: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields names of a decoder layer's quantizable weights, with their modules and names there."""
    for path, module in layer.named_modules():
        if STAY_PLAIN & {*path.split(".")} or is_adapter(f"{path}.weight"):
            continue
        if type(module) is nn.Linear:
            names = ["weight"]
        elif is_named(path, EXPERTS):
            names = [name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3]
        else:
            continue
        yield from ((f"{path}.{name}", module, name) for name in names)
