"""Makes what samples for clients next to each rank, and the way by which it gets weights."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from automodel_rl.config import LoraConfig, ServeConfig
from automodel_rl.config.generators import VllmSamplerConfig
from automodel_rl.data.ends import completion_ends
from automodel_rl.generator_messages import VllmSettings
from automodel_rl.lora.rank import set_scale
from automodel_rl.model.handle import ModelHandle
from automodel_rl.rollout.generator_process import GeneratorProcess
from automodel_rl.rollout.make_generator import adapter_options, name_of, visible_devices
from automodel_rl.rollout.model_copy import ModelCopy
from automodel_rl.rollout.transformers_generator import TransformersGenerator, Writing
from automodel_rl.rollout.vllm_process import start_vllm
from automodel_rl.weight_sync.local import Local
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.vllm import VllmSameDevice
from automodel_rl.weight_sync.vllm_adapters import VllmAdapters

SYNC_SECONDS = 300.0
"""Longest wait for an answer of vLLM about weights."""

PLACES = 2
"""Adapters that vLLM has at once: completions of the old ones are all written before new ones come."""


@dataclass(frozen=True)
class RankGenerator:
    """The generator of a rank.

    Attributes:
        generator: writes completions.
        transport: the way by which it gets weights.
        set_scale: tells the factor of the output of the adapters that come next.
    """

    generator: TransformersGenerator | GeneratorProcess
    transport: Transport
    set_scale: Callable[[float], None]


def make_generator(config: ServeConfig, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase) -> RankGenerator:
    """Starts this rank's generator.

    Args:
        config: the service's config.
        handle: the trained model.
        tokenizer: its tokenizer.

    Raises:
        InputError: it does not start.
    """
    lora, device = handle.model.lora, handle.layout.device
    ends = tuple(sorted(completion_ends(handle.source, handle.whole_config, tokenizer)))
    if isinstance(config.generator, VllmSamplerConfig):
        return _vllm(config.generator, config, handle, tokenizer, ends)
    adapters = None if lora is None else (lora, handle.source)
    copy = ModelCopy(handle.config, handle.family, handle.dtype, device, adapters)
    generator = TransformersGenerator(copy, Writing(tokenizer, config.generator.batch_size, ends))
    return RankGenerator(
        generator, Local(generator.receiver, device), lambda scale: set_scale([generator.model], scale)
    )


def _vllm(
    sampler: VllmSamplerConfig,
    config: ServeConfig,
    handle: ModelHandle,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
) -> RankGenerator:
    layout, origin = handle.layout, handle.adapter_origin
    options = {
        "model": str(handle.source),
        "tokenizer": str(tokenizer.name_or_path),
        "dtype": name_of(handle.dtype),
        "max_model_len": config.microbatch_tokens,
        "gpu_memory_utilization": sampler.memory_fraction,
    }
    if origin is None:
        options |= {"weight_transfer_config": {"backend": "same_device"}}
    else:
        options |= adapter_options(origin.config.rank, PLACES)
    settings = VllmSettings(options | sampler.options, ends)
    process = start_vllm(sampler.python, settings, visible_devices((), layout.device))
    if origin is None:
        return RankGenerator(process, VllmSameDevice(process, layout, SYNC_SECONDS, None), lambda scale: None)
    transport = VllmAdapters(process, origin, layout.device, SYNC_SECONDS)

    def scale_next(scale: float) -> None:
        transport.origin = dataclasses.replace(origin, config=_with_scale(origin.config, scale))

    return RankGenerator(process, transport, scale_next)


def _with_scale(lora: LoraConfig, scale: float) -> LoraConfig:
    """The config of adapters in places of the largest rank, whose output has this factor."""
    return lora.model_copy(update={"alpha": scale * lora.rank, "rslora": False})
