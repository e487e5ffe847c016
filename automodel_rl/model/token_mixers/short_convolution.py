"""LFM2's gated short convolution, confined to each packed sequence.

Shape letters: t tokens of this rank, T tokens of the microbatch, C channels of this rank.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_rl.batch import LocalMicrobatch
from automodel_rl.model.token_mixers.token_mixer import Rule, TokenMixer
from automodel_rl.model.token_mixers.whole_sequences import convolve, over_whole_sequences
from automodel_rl.parallel.tensor_parallel import Sections, own_rows


@dataclass(frozen=True)
class ShortConvolution(TokenMixer):
    """A gated short convolution. Its rule is `convolve`; each channel is a head of its own."""

    module: str = "conv"
    convolution: str = "conv"
    has_kernels: ClassVar[bool] = False

    def choose_rule(self, device: torch.device, dtype: torch.dtype) -> Rule:
        del device, dtype
        return convolve

    def split(self, module: Any, tp: int) -> None:
        del module, tp

    def forward(
        self, module: Any, hidden: Tensor, microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None
    ) -> Tensor:
        before, after, inputs = module.in_proj(hidden).squeeze(0).chunk(3, dim=-1)  # each [t, C]
        mixed = _mix(module, before * inputs, microbatch, cp_group)
        return module.out_proj((after * mixed)[None])

    def replace_forward(self, layer: Any, module: Any) -> None:
        """Replaces the layer's forward, too: transformers' passes the microbatch to attention only."""
        super().replace_forward(layer, module)
        layer.forward = MethodType(_layer_forward, layer)


def _layer_forward(layer: Any, hidden: Tensor, **arguments: Any) -> Tensor:
    hidden = hidden + layer.conv(layer.operator_norm(hidden), **arguments)
    return hidden + layer.feed_forward(layer.ffn_norm(hidden))


@torch.compiler.disable  # exchanges between ranks
def _mix(module: Any, inputs: Tensor, microbatch: LocalMicrobatch, cp_group: dist.ProcessGroup | None) -> Tensor:
    weight, bias = module.conv.weight.squeeze(1), module.conv.bias
    for group in (module.tp_group, cp_group):
        if group is not None:
            sections = Sections((len(weight),))
            weight, bias = (None if part is None else own_rows(part, sections, group) for part in (weight, bias))

    def compute(inputs: Tensor) -> Tensor:
        return module.rule(inputs.squeeze(2), weight, bias, microbatch.offsets)[..., None]

    return over_whole_sequences(compute, (inputs[..., None],), microbatch, cp_group).squeeze(2)
