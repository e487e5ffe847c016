"""The weights of decoder layers that a base in few bits is made of: frozen linear layers and stacks of experts."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from automodel_rl.errors import InputError
from automodel_rl.few_bits.linear import NF4Linear
from automodel_rl.few_bits.nf4 import BLOCK
from automodel_rl.few_bits.weight import HOLDER, NF4Weight
from automodel_rl.lora.experts import EXPERTS
from automodel_rl.lora.layers import is_adapter, is_named

STAY_PLAIN = frozenset({"indexer", "gate", "router", "shared_expert_gate"})
"""Names of modules of which nothing is kept in few bits: a small change of a choice is a large one of a result."""


def keep_in_nf4(layers: Iterable[nn.Module]) -> None:
    """Keeps the base of decoder layers without storage in nf4, in place.

    Raises:
        InputError: a weight's rows are not whole blocks.
    """
    for layer in layers:
        for path, module, name in list(_places(layer)):
            kept: Any = module
            weight = kept._parameters[name]
            if weight.shape[-1] % BLOCK:
                raise InputError(
                    f"model.lora.base=nf4: {path} has rows of {weight.shape[-1]} values, which are not whole blocks of "
                    f"{BLOCK}: use base=plain"
                )
            del kept._parameters[name]
            if isinstance(module, nn.Linear):
                kept.__class__ = NF4Linear
                kept.few_bits = NF4Weight(weight)
                continue
            if HOLDER not in dict(kept.named_children()):
                kept.few_bits = nn.ModuleDict()
            kept.few_bits[name] = NF4Weight(weight)


def names_of_base(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and weights that a base in few bits is made of, of a causal language model with plain weights."""
    for number, layer in enumerate(model.model.layers):
        for path, module, name in _places(layer):
            yield f"model.layers.{number}.{path}", getattr(module, name)


def nf4_weights(part: nn.Module) -> Iterator[tuple[str, NF4Weight, nn.Module]]:
    """The weights in nf4 of a part, by the names that plain ones have, with the modules that use them."""
    modules = dict(part.named_modules())
    for path, held in modules.items():
        if isinstance(held, NF4Weight):
            owner, _, name = path.rpartition(f".{HOLDER}")
            yield f"{owner}{name or '.weight'}", held, modules[owner]


def _places(layer: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Names of the base's weights in a decoder layer, with the modules that have them and their names there."""
    for path, module in layer.named_modules():
        if STAY_PLAIN & {*path.split(".")} or is_adapter(f"{path}.weight"):
            continue
        if type(module) is nn.Linear:
            names = ["weight"]
        elif is_named(path, EXPERTS):
            names = [name for name, weight in module.named_parameters(recurse=False) if weight.ndim == 3]
        else:
            continue
        for name in names:
            if not getattr(module, name).requires_grad:
                yield f"{path}.{name}", module, name
