"""Creates the configured generator, and the transport of weights to it."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.config.generator_spec import GeneratorSpec
from automodel_rl.config.generators import (
    JoinedGeneratorConfig,
    TransformersSamplerConfig,
    VllmGeneratorConfig,
    VllmSamplerConfig,
    VllmServersConfig,
)
from automodel_rl.data.media import open_readers
from automodel_rl.data.stop_tokens import completion_stop_ids
from automodel_rl.errors import InputError
from automodel_rl.families.encoder import ReadingOptions
from automodel_rl.generator_messages import VllmSettings
from automodel_rl.generators.child_process import ChildProcess
from automodel_rl.generators.generator_process import GeneratorProcess, NotStartedError
from automodel_rl.generators.generator_ranks import GeneratorRanks, NoGenerator
from automodel_rl.generators.joining_messages import Welcome
from automodel_rl.generators.model_copy import ModelCopy
from automodel_rl.generators.protocol import RankGenerator
from automodel_rl.generators.transformers_generator import TransformersGenerator, TransformersSettings
from automodel_rl.generators.visible_devices import local_rank, visible_devices
from automodel_rl.generators.vllm_checks import connect_servers
from automodel_rl.generators.vllm_process import start_vllm
from automodel_rl.generators.vllm_replicas import DEFAULT_MAX_NUM_SEQS, VllmReplicas, cache_bytes
from automodel_rl.generators.vllm_servers import VllmServers
from automodel_rl.model.handle import ModelHandle
from automodel_rl.quantized.nf4 import BLOCK
from automodel_rl.support.description import num_mixed_layers
from automodel_rl.support.run_rules import VLLM_RANKS
from automodel_rl.weight_sync.collective import CollectiveTransport
from automodel_rl.weight_sync.ipc import IpcTransport
from automodel_rl.weight_sync.local import LocalTransport
from automodel_rl.weight_sync.publisher import FileTransport
from automodel_rl.weight_sync.sync import sync_dtype
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.vllm import VllmNccl, VllmSameDevice
from automodel_rl.weight_sync.vllm_adapters import VllmAdapters

TRANSFORMERS_WORKER = ("-m", "automodel_rl.generators.transformers_worker")

MULTIPROCESS_OPTIONS = {"distributed_executor_backend": "mp"}
CPU_OPTIONS = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 2**29}
"""vLLM options for a CPU. There, a prompt in chunks fails if its completion has a seed, and a share of all memory
would have to be free."""

SHARED_BUFFER_OPTIONS = {"worker_extension_cls": "vllm_split_worker.SplitWorker"}
"""vLLM options on the ranks' GPUs, whose buffers its processes read."""


def image_options(pixels: tuple[int | None, int | None]) -> dict[str, Any]:
    """Returns vLLM options for prompts with images: the trainer's image processor, as the fast one resizes with
    another library, so that pixels differ; its limits; and no memory for videos."""
    limits = {key: value for key, value in zip(("min_pixels", "max_pixels"), pixels, strict=True) if value is not None}
    return {"mm_processor_kwargs": {"use_fast": False, **limits}, "limit_mm_per_prompt": {"video": 0}}


def make_generator(
    spec: GeneratorSpec,
    handle: ModelHandle,
    tokenizer: PreTrainedTokenizerBase,
    ranks: GeneratorRanks,
    is_first: bool = True,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[RankGenerator, Transport]:
    """Starts this rank's generator, and creates the transport for its weights.

    Args:
        is_first: whether this is the first start. In a later one, some servers may be gone.
        meanwhile: called while a process starts.

    Raises:
        InputError: the generator does not start, or its base of adapters would differ from the trainer's.
    """
    _check_base(spec, handle)
    ends = _ends(spec, handle, tokenizer)
    match spec.choice:
        case JoinedGeneratorConfig():
            return NoGenerator(), FileTransport(handle)
        case VllmServersConfig() as servers:
            return _vllm_servers(servers, spec, handle, ends, is_first)
        case VllmSamplerConfig() as vllm:
            return _vllm_process(vllm, spec, handle, tokenizer, ends, ranks, meanwhile)
        case TransformersSamplerConfig() as transformers:
            return _transformers(
                transformers, spec, handle, TransformersSettings(tokenizer, transformers.batch_size, ends)
            )


def welcome_of(spec: GeneratorSpec, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase) -> Welcome:
    """Returns the settings for generators that join a run."""
    assert isinstance(spec.choice, JoinedGeneratorConfig)
    writing = TransformersSettings(tokenizer, spec.choice.batch_size, _ends(spec, handle, tokenizer))
    options, timeout = _options_of_model(spec, handle, tokenizer), spec.weight_sync.timeout
    return Welcome(_copy(spec, handle), writing, options, timeout, handle.config.vocab_size)


def transport_without_generator(spec: GeneratorSpec, handle: ModelHandle, ranks: GeneratorRanks) -> Transport | None:
    """Returns the transport for a rank whose generator does not restart, to take part in weight syncs of the others;
    None if it is not needed."""
    if isinstance(spec.choice, VllmSamplerConfig):
        return _vllm_transport(NoGenerator(), spec, handle, ranks)
    return None


def _check_base(spec: GeneratorSpec, handle: ModelHandle) -> None:
    """Raises InputError if generators would have another base than the trainer: some files in nf4 contain plain
    weights, or blocks of other sizes."""
    if spec.weight_sync.adapters == "alone" and handle.quantized_here:
        raise InputError(
            f"weight_sync.adapters=alone with model.lora.base=nf4: {handle.quantized_here[0]} is not nf4 with "
            f"blocks of {BLOCK} in {handle.source}, so generators would have another base than the trainer: use merged"
        )


def _transformers(
    choice: TransformersSamplerConfig, spec: GeneratorSpec, handle: ModelHandle, writing: TransformersSettings
) -> tuple[RankGenerator, Transport]:
    weights, device, copy = spec.weight_sync, handle.layout.device, _copy(spec, handle)
    if choice.transport == "local":
        within = TransformersGenerator(copy, writing)
        return within, LocalTransport(within.receiver, device)
    _check_devices(choice.devices)
    visible = visible_devices(choice.devices, device.index) if device.type == "cuda" else None
    process = start_transformers(copy, writing, visible)
    if choice.transport == "ipc":
        return process, IpcTransport(process, device, weights.timeout)
    return process, CollectiveTransport(process, handle, weights.timeout)


def _copy(spec: GeneratorSpec, handle: ModelHandle) -> ModelCopy:
    lora = handle.model.lora if spec.weight_sync.adapters == "alone" else None
    return ModelCopy(
        handle.whole_config,
        handle.family,
        sync_dtype(spec.weight_sync, handle),
        handle.layout.device,
        adapters=None if lora is None else (lora, handle.source),
        capture_routes=spec.reports_routes,
        media=open_readers(handle.source, handle.whole_config, ReadingOptions(spec.pixels)),
    )


def _ends(spec: GeneratorSpec, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    own = completion_stop_ids(handle.source, handle.whole_config, tokenizer, spec.template_variables)
    return merge_stop_ids(own, spec.stop_token_ids, handle.config.vocab_size)


def _check_devices(devices: Sequence[int]) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if devices and len(devices) < local_ranks:
        raise InputError(
            f"rollout.generator.place={list(devices)}: each of the {local_ranks} ranks on a machine needs one device: "
            f"list {local_ranks}"
        )


def start_transformers(copy: ModelCopy, writing: TransformersSettings, visible: str | None) -> GeneratorProcess:
    """Starts a transformers generator in its own process.

    Args:
        visible: its CUDA_VISIBLE_DEVICES: the one device on which it computes. None to inherit it.

    Raises:
        InputError: the generator does not start.
    """
    environment = None
    if visible is not None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        copy = dataclasses.replace(copy, device=torch.device("cuda", 0))
    process = GeneratorProcess(ChildProcess([sys.executable, *TRANSFORMERS_WORKER], environment), (copy, writing))
    try:
        process.start()
    except NotStartedError as error:
        raise InputError(f"rollout.generator: the generator failed to start ({error})") from None
    return process


def _vllm_servers(
    choice: VllmServersConfig, spec: GeneratorSpec, handle: ModelHandle, ends: tuple[int, ...], is_first: bool
) -> tuple[RankGenerator, Transport]:
    connected = connect_servers(choice.urls, spec.reports_routes, some_may_be_gone=not is_first)
    servers = VllmServers(choice.urls, connected, ends, is_leader=dist.get_rank() == 0, routes=spec.reports_routes)
    layout, seconds = handle.layout, spec.weight_sync.timeout
    if layout.device.type == "cpu":
        return servers, VllmSameDevice(servers.weights, layout.device, seconds)
    return servers, VllmNccl(servers.weights, layout, seconds)


def _vllm_process(
    choice: VllmSamplerConfig,
    spec: GeneratorSpec,
    handle: ModelHandle,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    ranks: GeneratorRanks,
    meanwhile: Callable[[], None],
) -> tuple[RankGenerator, Transport]:
    if not ranks.is_leader:
        channel = NoGenerator()
        return channel, _vllm_transport(channel, spec, handle, ranks)
    device = handle.layout.device
    visible = visible_devices(choice.devices, local_rank() if device.index is None else device.index, ranks.size)
    settings = VllmSettings(_vllm_options(choice, spec, handle, tokenizer, ranks), ends)
    process = start_vllm(choice.python, settings, visible, _num_replicas(choice), meanwhile)
    if process.warning and dist.get_rank() == 0:
        print(process.warning, flush=True)
    return process, _vllm_transport(process, spec, handle, ranks)


def _vllm_options(
    choice: VllmSamplerConfig,
    spec: GeneratorSpec,
    handle: ModelHandle,
    tokenizer: PreTrainedTokenizerBase,
    ranks: GeneratorRanks,
) -> dict[str, Any]:
    drafts = choice.drafts if isinstance(choice, VllmGeneratorConfig) else 0
    device = handle.layout.device
    origin = handle.adapter_origin if spec.weight_sync.adapters == "alone" else None
    transfer = {"weight_transfer_config": {"backend": "nccl" if choice.devices else "same_device"}}
    return {
        **_options_of_model(spec, handle, tokenizer),
        "gpu_memory_utilization": choice.memory_fraction / _num_replicas(choice),
        **_cache_of_replica(choice, handle),
        **(transfer if origin is None else adapter_options(origin.config.rank, spec.num_adapters)),
        **({"enable_sleep_mode": True} if spec.sleep_level else {}),
        **(MULTIPROCESS_OPTIONS | {"tensor_parallel_size": ranks.size} if ranks.size > 1 else {}),
        **(SHARED_BUFFER_OPTIONS if ranks.group is not None else {}),
        **({"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}),
        **(CPU_OPTIONS if device.type == "cpu" and not choice.devices else {}),
        **choice.options,
    }


def _options_of_model(spec: GeneratorSpec, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Returns vLLM options that follow from the model and the run, wherever vLLM runs."""
    needs_tokenizer = spec.has_stop_texts or handle.has_encoder
    on_cpu = handle.layout.device.type == "cpu"
    return {
        "model": str(handle.source),
        "dtype": name_of(sync_dtype(spec.weight_sync, handle)),
        "max_model_len": spec.longest_sequence,
        **({"tokenizer": str(tokenizer.name_or_path)} if needs_tokenizer else {"skip_tokenizer_init": True}),
        **(image_options(spec.pixels) if handle.has_encoder else {}),
        **({"enable_return_routed_experts": True} if spec.reports_routes else {}),
        # States of prompts are cached only if prompts come in chunks.
        **({"enable_prefix_caching": False} if on_cpu and num_mixed_layers(handle.config) else {}),
    }


def _cache_of_replica(choice: VllmSamplerConfig, handle: ModelHandle) -> dict[str, int]:
    """Returns the vLLM option for the cache size if several replicas start on one GPU at the same time."""
    device, replicas = handle.layout.device, _num_replicas(choice)
    if replicas == 1 or device.type != "cuda" or "kv_cache_memory_bytes" in choice.options:
        return {}
    share = torch.cuda.get_device_properties(device).total_memory * choice.memory_fraction / replicas
    weights = handle.num_values * handle.dtype.itemsize
    at_once = int(choice.options.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS)
    return {"kv_cache_memory_bytes": cache_bytes(share, weights, handle.description.vocab_size, at_once)}


def _num_replicas(choice: VllmSamplerConfig) -> int:
    return choice.replicas if isinstance(choice, VllmGeneratorConfig) else 1


def _vllm_transport(
    channel: GeneratorProcess | VllmReplicas | NoGenerator,
    spec: GeneratorSpec,
    handle: ModelHandle,
    ranks: GeneratorRanks,
) -> Transport:
    weights, layout = spec.weight_sync, handle.layout
    if weights.adapters == "alone":
        assert handle.adapter_origin is not None
        return VllmAdapters(channel, handle.adapter_origin, layout.device, weights.timeout)
    if spec.choice.devices:
        return VllmNccl(channel, layout, weights.timeout)
    return VllmSameDevice(channel, layout.device, weights.timeout, ranks.group)


def adapter_options(rank: int, places: int) -> dict[str, Any]:
    """Returns vLLM options for adapters. `places` are in use at a time: a new one, and those of running completions."""
    largest = next(size for size in VLLM_RANKS if size >= rank)
    return {"enable_lora": True, "max_lora_rank": largest, "max_loras": places, "max_cpu_loras": places}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def merge_stop_ids(own: set[int], asked: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the tokens that end a completion, of model and config. Raises InputError if the vocabulary lacks one."""
    if asked and max(asked) >= vocab_size:
        raise InputError(
            f"rollout.stop_token_ids={[*asked]}: the model's vocabulary has {vocab_size} tokens, so ids are below "
            f"that: remove {max(asked)}"
        )
    return tuple(sorted({*own, *asked}))
