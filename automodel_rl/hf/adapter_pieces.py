"""Adapters by checkpoint tensor, to merge them there, or to write experts' adapters one by one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from automodel_rl.families.known import CheckpointFamily
from automodel_rl.hf.names import pieces
from automodel_rl.lora.experts import adapted_weights_by_name
from automodel_rl.lora.layers import ADAPTER_NAMES, merged
from automodel_rl.lora.magnitude import magnitude_of
from automodel_rl.lora.peft import AdapterOrigin, write_adapters, write_single_adapters
from automodel_rl.lora.stacks import OWN


@dataclass(frozen=True)
class AdapterPiece:
    """The adapter of one checkpoint tensor.

    Attributes:
        down: `lora_A`, [rank, inputs], or a stack of these for stacked experts.
        up: `lora_B`, [outputs, rank], or a stack of these.
        is_transposed: whether the tensor is a stack [experts, inputs, outputs].
        lengths: DoRA magnitudes of the tensor's rows, [outputs].
    """

    down: Tensor
    up: Tensor
    is_transposed: bool = False
    lengths: Tensor | None = None

    def merged_into(self, tensor: Tensor, scale: float) -> Tensor:
        """Returns the tensor with the adapter merged, in fp32 or wider."""
        return merged(tensor, self.down, self.up, scale, self.is_transposed, self.lengths)


def adapter_pieces(adapters: Mapping[str, Tensor], family: CheckpointFamily) -> dict[str, AdapterPiece]:
    """Returns the adapters by the names of their checkpoint tensors. `adapters` has the model's names; other tensors
    are ignored."""
    found = {}
    for weight, layer in adapted_weights_by_name(adapters).items():
        down, up = (adapters[f"{layer}.{kind}.weight"] for kind in ADAPTER_NAMES)
        for piece in pieces(weight, (*up.shape[:-1], down.shape[-1]), family):
            if piece.expert is not None:
                found[piece.name] = AdapterPiece(down[piece.expert], up[piece.expert][piece.rows])
            else:
                is_transposed = down.ndim == 3 and family.language.transposes_experts
                lengths = adapters.get(magnitude_of(layer))
                found[piece.name] = AdapterPiece(down, up, is_transposed, lengths)
    return found


def one_by_one(adapters: Mapping[str, Tensor], family: CheckpointFamily) -> dict[str, Tensor]:
    """Splits experts' adapters into one per expert, as vLLM expects: `experts.3.gate_proj.lora_A.weight`. Gate and up
    get a copy each of their shared A. Other adapters are unchanged."""
    of_experts = {name: tensor for name, tensor in adapters.items() if OWN.fullmatch(name)}
    single = {name: tensor for name, tensor in adapters.items() if name not in of_experts}
    for name, piece in adapter_pieces(of_experts, family).items():
        layer = name.removesuffix(".weight")
        single[f"{layer}.lora_A.weight"] = piece.down.clone()
        single[f"{layer}.lora_B.weight"] = piece.up.clone()
    return single


def write_for_vllm(folder: Path, adapters: Mapping[str, Tensor], origin: AdapterOrigin) -> None:
    """Writes adapters in PEFT's format to an existing folder, experts one by one unless the family's files stack
    them."""
    if origin.family.file_names.experts is None:
        write_adapters(folder, dict(adapters), origin)
    else:
        write_single_adapters(folder, one_by_one(adapters, origin.family), origin)
