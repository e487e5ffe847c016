"""Private parts of transformers' configs and modules."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTextConfig

from automodel_rl.compat.versions import TRANSFORMERS


def set_attention(config: PretrainedConfig, name: str) -> None:
    """Chooses the attention function of a model that is already built.

    Args:
        config: the config that the modules with attention share.
        name: name of a function that is registered with transformers.
    """
    config._attn_implementation = name


@contextlib.contextmanager
def parameters_without_storage() -> Iterator[None]:
    """Parameters of modules that are made in this block are on the meta device, while buffers have values."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def without_modules(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of a module with the same parameters, in which some children are None. The module stays as it is.

    Args:
        module: the module.
        names: the names of the children that are left out.
    """
    found = copy.copy(module)
    found._modules = {name: None if name in names else child for name, child in module._modules.items()}
    return found


def text_model(config: PretrainedConfig, **options: Any) -> Any:
    """transformers' language model without a head, also where auto classes do not know it: Qwen2.5-Omni's.

    Args:
        config: the language model's config.
        options: as of `AutoModel.from_config`.
    """
    if isinstance(config, Qwen2_5OmniTextConfig):
        from transformers import Qwen2_5OmniThinkerTextModel  # a second of every process

        return Qwen2_5OmniThinkerTextModel._from_config(config, **options)
    return AutoModel.from_config(config, **options)


def hand_on_arguments(layers: Iterable[Any]) -> None:
    """Gives layers that have the modules of Llama's the forward of those, which hands on all arguments to attention."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # only for families that need it

    for layer in layers:
        layer.forward = MethodType(LlamaDecoderLayer.forward, layer)


def with_cache(cache: Any) -> dict[str, Any]:
    """The argument of a model's forward for its cache of keys and values."""
    return {"cache" if TRANSFORMERS >= (5, 24) else "past_key_values": cache}


def apply_gate(experts: Any, gate_up: Tensor) -> Tensor:
    """Activation and gate of a mixture's experts, as the experts' own class computes them.

    Args:
        experts: transformers' module of the experts.
        gate_up: output of the gate and up projections for s tokens, [s, 2 * intermediate size].

    Returns:
        Input of the down projection, [s, intermediate size].
    """
    return experts._apply_gate(gate_up)
