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
    """Sets the attention function of a built model, by its registered name, in the config that its modules share."""
    config._attn_implementation = name


@contextlib.contextmanager
def parameters_without_storage() -> Iterator[None]:
    """Inside the block, new modules' parameters are on the meta device, while buffers have values."""
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
    """Returns a copy of a module with the same parameters and some children replaced by None."""
    found = copy.copy(module)
    found._modules = {name: None if name in names else child for name, child in module._modules.items()}
    return found


def text_model(config: PretrainedConfig, **options: Any) -> Any:
    """Returns transformers' language model without a head, including Qwen2.5-Omni's, which auto classes lack.
    `options` are those of `AutoModel.from_config`."""
    if isinstance(config, Qwen2_5OmniTextConfig):
        from transformers import Qwen2_5OmniThinkerTextModel  # takes a second to import

        return Qwen2_5OmniThinkerTextModel._from_config(config, **options)
    return AutoModel.from_config(config, **options)


def pass_all_arguments(layers: Iterable[Any]) -> None:
    """Gives layers with Llama's modules Llama's forward, which passes all arguments to attention."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # only for families that need it

    for layer in layers:
        layer.forward = MethodType(LlamaDecoderLayer.forward, layer)


def with_cache(cache: Any) -> dict[str, Any]:
    """Returns the keyword argument of a model's forward for its key-value cache."""
    return {"cache" if TRANSFORMERS >= (5, 24) else "past_key_values": cache}


def apply_gate(experts: Any, gate_up: Tensor) -> Tensor:
    """Computes activation and gate of a mixture's experts by their own class: gate and up projections
    [s, 2 * intermediate size] to the down projection's input [s, intermediate size]."""
    return experts._apply_gate(gate_up)
