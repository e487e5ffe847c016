"""All token mixers, and their installation by family."""

from typing import Any

import torch
from torch import nn

from automodel_rl.families.family import Family
from automodel_rl.model.token_mixers.gated_delta_net import GatedDeltaNet
from automodel_rl.model.token_mixers.kimi_delta import KimiDelta
from automodel_rl.model.token_mixers.mamba2 import Mamba2, ScaledMamba2
from automodel_rl.model.token_mixers.short_convolution import ShortConvolution
from automodel_rl.model.token_mixers.token_mixer import TokenMixer
from automodel_rl.parallel.tensor_parallel import TensorParallel

TOKEN_MIXERS: dict[str, TokenMixer] = {
    "gated_delta_net": GatedDeltaNet(),
    "olmo_delta_net": GatedDeltaNet(norm="o_norm", output="o_proj"),
    "kimi_delta": KimiDelta(),
    "short_convolution": ShortConvolution(),
    "mamba2": Mamba2("mamba"),
    "nemotron_mamba2": Mamba2("mixer"),
    "scaled_mamba2": ScaledMamba2("mamba"),
}
"""Token mixers by the names in `Family.token_mixer`."""


def set_decays_apart(layers: list[Any], family: Family) -> None:
    """Moves parameters that stay in fp32 into a submodule `decay` of each layer's token mixer."""
    if family.token_mixer:
        mixer = TOKEN_MIXERS[family.token_mixer]
        for module in (mixer.of(layer) for layer in layers):
            if module is not None:
                mixer.set_apart(module)


def install_token_mixers(
    layers: list[Any], family: Family, how: TensorParallel, device: torch.device, dtype: torch.dtype
) -> None:
    """Replaces the forward of token mixers, after tensor parallelism has split the layers. `how` is this rank's tp
    group.

    Raises:
        InputError: required kernels are missing, or known to be wrong.
    """
    if family.token_mixer:
        mixer = TOKEN_MIXERS[family.token_mixer]
        mixed = [layer for layer in layers if mixer.of(layer) is not None]
        for layer in mixed:
            mixer.install(layer, how, mixer.choose_rule(device, dtype))


def last_projection(layer: nn.Module, family: Family) -> Any | None:
    """Returns the output projection of a layer's attention or token mixer; None if it has neither."""
    mixer = TOKEN_MIXERS.get(family.token_mixer)
    module = None if mixer is None else mixer.of(layer)
    if mixer is not None and module is not None:
        return module.get_submodule(mixer.output)
    names = ("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj")
    modules = dict(layer.named_modules())
    return next((modules[name] for name in names if name in modules), None)
