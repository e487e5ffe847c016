"""Adapters by the tensors of a checkpoint's files: to merge them there, or to write those of experts one by one."""

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
    """The adapter of one tensor of a checkpoint.

    Attributes:
        down: its `lora_A`, [rank, inputs], or a stack of these for a stack of experts.
        up: its `lora_B`, [outputs, rank], or a stack of these.
        is_transposed: whether the tensor is a stack [experts, inputs, outputs].
        lengths: the trained lengths of the tensor's rows, [outputs], if the adapter has them.
    """

    down: Tensor
    up: Tensor
    is_transposed: bool = False
    lengths: Tensor | None = None

    def merged_into(self, tensor: Tensor, scale: float) -> Tensor:
        """The tensor with the adapter merged in, in fp32 or wider."""
        return merged(tensor, self.down, self.up, scale, self.is_transposed, self.lengths)


def adapter_pieces(adapters: Mapping[str, Tensor], family: CheckpointFamily) -> dict[str, AdapterPiece]:
    """The adapters by the names of the checkpoint's tensors that they belong to.

    Args:
        adapters: adapters by the model's names; other tensors are left out.
        family: the checkpoint's family, with the names that its files have.
    """
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
    """Adapters with those of experts one by one, as vLLM wants them: `experts.3.gate_proj.lora_A.weight`. Gate and up
    have a copy each of the A that they share.

    Args:
        adapters: adapters by the model's names; what belongs to no experts stays.
        family: a family whose files have experts one by one.
    """
    of_experts = {name: tensor for name, tensor in adapters.items() if OWN.fullmatch(name)}
    single = {name: tensor for name, tensor in adapters.items() if name not in of_experts}
    for name, piece in adapter_pieces(of_experts, family).items():
        layer = name.removesuffix(".weight")
        single[f"{layer}.lora_A.weight"] = piece.down.clone()
        single[f"{layer}.lora_B.weight"] = piece.up.clone()
    return single


def write_for_vllm(folder: Path, adapters: Mapping[str, Tensor], origin: AdapterOrigin) -> None:
    """Writes adapters in PEFT's format; those of experts one by one, but for families whose files stack experts.

    Args:
        folder: a folder that exists.
        adapters: all adapters, by the model's names.
        origin: the model that they belong to.
    """
    if origin.family.file_names.experts is None:
        write_adapters(folder, dict(adapters), origin)
    else:
        write_single_adapters(folder, one_by_one(adapters, origin.family), origin)
