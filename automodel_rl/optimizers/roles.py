"""Roles of a model's parameters, by the modules that own them. They determine weight decay and what Muon trains.

Neither names nor numbers of dims suffice: norm weights may have two dims, and a router may be a linear layer.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

from torch import nn

from automodel_rl.families.known import FAMILIES, MULTIMODAL_FAMILIES, language_config
from automodel_rl.lora.experts import EXPERTS, STACKED, UP, Stack

HEAD = "lm_head"
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

_ENCODERS = [
    encoder for family in MULTIMODAL_FAMILIES.values() for encoders in family.encoders.values() for encoder in encoders
]
BARE_MATRICES = tuple(name for encoder in _ENCODERS for name in encoder.bare_matrices)
BARE_TABLES = tuple(name for encoder in _ENCODERS for name in encoder.bare_tables)


class Role(Enum):
    """A parameter's role in the model. Parameters without a role are numbers per channel, head or expert, such as
    norm weights, biases, sinks and decays of linear attention."""

    MATRIX = "matrix of a hidden layer: of a linear layer, of an adapter, or of every expert of a stack"
    TRANSPOSED_MATRIX = "the same, stored as [inputs, outputs]"
    ROWS = "rows or filters by themselves: of tokens and places (embeddings, head), of experts (routers), of channels"


def roles_of(part: nn.Module) -> dict[str, Role]:
    """Returns the roles of a part's parameters by name; a tied weight under all of its names. Parameters without a
    role are omitted."""
    routers = {id(module) for router in _routers(part) for module in router.modules()}
    found: dict[str, Role] = {}
    for path, module in part.named_modules():
        prefix = f"{path}." if path else ""
        for name, role in _own_roles(path, module).items():
            in_rows = id(module) in routers or path == HEAD
            found[prefix + name] = Role.ROWS if in_rows else role
        for name, _ in module.named_parameters(recurse=False):
            if (prefix + name).endswith(BARE_MATRICES):
                found[prefix + name] = Role.TRANSPOSED_MATRIX
            elif (prefix + name).endswith(BARE_TABLES) or (id(module) in routers and name == "weight"):
                found[prefix + name] = Role.ROWS
    return found


def _own_roles(path: str, module: Any) -> dict[str, Role]:
    """Returns the roles of a module's own parameters. A matrix of one row counts as a vector."""
    if isinstance(module, nn.Linear):
        return {"weight": Role.MATRIX if len(module.weight) > 1 else Role.ROWS}
    if isinstance(module, (nn.Embedding, *CONVOLUTIONS)):
        return {"weight": Role.ROWS}
    if isinstance(module, Stack):
        return {"weight": Role.MATRIX}
    if path.rpartition(".")[2] == EXPERTS:
        own = dict(module.named_parameters(recurse=False))
        return {
            name: Role.TRANSPOSED_MATRIX if module.is_transposed else Role.MATRIX
            for name in (*STACKED, UP)
            if name in own
        }
    return {}


def _routers(part: Any) -> Iterator[nn.Module]:
    """Yields the routers of all mixtures, as named by the family."""
    for module in part.modules():
        children = dict(module.named_children())
        if EXPERTS in children:
            yield children[FAMILIES[language_config(part.config).model_type].router]
