"""Layouts of experts' adapters in files: stacked, as in PEFT, or one by one, as vLLM expects for most families.

PEFT keeps the stacked weights of an experts module in nested wrappers (`target_parameters`, peft 0.19.1 and later):
`experts.lora_A.weight` belongs to the last adapted weight, and `experts.base_layer.lora_A.weight` to the one before.
It stores all experts' A one below the other, [experts * rank, inputs], and their B side by side with the expert as
the fastest dim, [outputs, rank * experts].
"""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from automodel_rl.lora.experts import ADAPTERS, EXPERTS, STACKED
from automodel_rl.lora.layers import is_named

WRAPPED = re.compile(rf"(.+\.{EXPERTS})\.((?:base_layer\.)*)(lora_[AB])\.weight")
OWN = re.compile(rf"(.+\.{EXPERTS})\.{ADAPTERS}\.(\w+)\.(lora_[AB])\.weight")


def to_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts adapters from the model's names to PEFT's names and shapes; other tensors are unchanged."""
    turned = {}
    for name, tensor in tensors.items():
        own = OWN.fullmatch(name)
        if own is None:
            turned[name] = tensor
            continue
        experts, weight, kind = own.groups()
        there = [other for other in STACKED if f"{experts}.{ADAPTERS}.{other}.{kind}.weight" in tensors]
        depth = len(there) - 1 - there.index(weight)
        flat = tensor.flatten(0, 1) if kind == "lora_A" else tensor.permute(1, 2, 0).flatten(1)
        turned[f"{experts}.{'base_layer.' * depth}{kind}.weight"] = flat.contiguous()
    return turned


def from_peft(tensors: Mapping[str, Tensor], rank: int, target_parameters: Iterable[str]) -> dict[str, Tensor]:
    """Converts adapters from PEFT's names to the model's names and shapes; other tensors are unchanged.

    Args:
        target_parameters: from PEFT's config. If only one weight of an experts module has adapters, this alone tells
            which.
    """
    targets = [*target_parameters]
    nested = {match[1] for name in tensors if (match := WRAPPED.fullmatch(name)) and match[2]}
    turned = {}
    for name, tensor in tensors.items():
        wrapped = WRAPPED.fullmatch(name)
        if wrapped is None or tensor.ndim != 2 or tensor.shape[int(wrapped[3] == "lora_B")] % rank:
            turned[name] = tensor  # an adapter of experts with another shape fits nothing in the model
            continue
        experts, depth, kind = wrapped.groups()
        asked = [weight for weight in STACKED if any(is_named(f"{experts}.{weight}", target) for target in targets)]
        weight = (STACKED[0] if depth else STACKED[1]) if experts in nested else [*asked, STACKED[-1]][0]
        stack = (
            tensor.unflatten(0, (-1, rank))
            if kind == "lora_A"
            else tensor.unflatten(1, (rank, -1)).permute(2, 0, 1).contiguous()
        )
        turned[f"{experts}.{ADAPTERS}.{weight}.{kind}.weight"] = stack
    return turned
