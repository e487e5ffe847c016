"""The engine that a config asks for, and the way of weights to it."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.config import GRPOConfig
from automodel_rl.errors import InputError
from automodel_rl.model.handle import ModelHandle
from automodel_rl.rollout.engine_process import EngineProcess
from automodel_rl.rollout.protocol import RolloutEngine
from automodel_rl.rollout.transformers_engine import TransformersEngine, stop_ids
from automodel_rl.rollout.vllm_engine import VllmServers, start_vllm
from automodel_rl.weight_sync.collective import Collective
from automodel_rl.weight_sync.ipc import Ipc
from automodel_rl.weight_sync.local import Local
from automodel_rl.weight_sync.sync import sync_dtype
from automodel_rl.weight_sync.transport import Transport
from automodel_rl.weight_sync.vllm import VllmNccl, VllmSameDevice

TRANSFORMERS_WORKER = ("-m", "automodel_rl.rollout.transformers_worker")


def make_engine(
    config: GRPOConfig, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase
) -> tuple[RolloutEngine, Transport]:
    """Starts this rank's engine, which has no weights yet, and makes the way that they come.

    Args:
        config: of the run.
        handle: the model that is trained.
        tokenizer: of the model.

    Raises:
        InputError: the engine does not start.
    """
    rollout, weights, device = config.rollout, config.weight_sync, handle.layout.device
    if rollout.engine == "vllm":
        return _vllm(config, handle, tokenizer)
    arguments: dict[str, Any] = {
        "config": handle.config,
        "dtype": sync_dtype(weights, handle),
        "device": device,
        "tokenizer": tokenizer,
        "max_new_tokens": rollout.max_new_tokens,
        "stop": rollout.stop,
        "batch_size": rollout.batch_size,
        "adapters": (handle.model.lora, handle.source) if weights.adapters == "alone" else None,
        "capture_routes": config.router_replay.enabled,
    }
    if not rollout.own_process:
        engine = TransformersEngine(**arguments)
        return engine, Local(engine.receiver, device)
    visible = visible_device(rollout.devices, device)
    if visible is not None:
        arguments["device"] = torch.device("cuda", 0)
    process = start_transformers(arguments, visible)
    if config.transport == "ipc":
        return process, Ipc(process, device, weights.timeout)
    if device.type == "cuda" and not rollout.devices:
        raise InputError(
            "weight_sync.transport=collective: NCCL does not join two processes on one device: use ipc, or give the "
            "engines rollout.devices of their own"
        )
    return process, Collective(process, handle.layout, weights.timeout)


def start_transformers(arguments: dict[str, Any], visible: str | None) -> EngineProcess:
    """A transformers engine in a process of its own.

    Args:
        arguments: of `TransformersEngine`.
        visible: its CUDA_VISIBLE_DEVICES; None leaves the environment's.

    Raises:
        InputError: it does not start.
    """
    environment = None if visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    try:
        return EngineProcess([sys.executable, *TRANSFORMERS_WORKER], environment, ("start", arguments))
    except RuntimeError as error:
        raise InputError(f"rollout.own_process: the engine does not start ({error})") from None


def _vllm(
    config: GRPOConfig, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase
) -> tuple[RolloutEngine, Transport]:
    rollout, weights, layout = config.rollout, config.weight_sync, handle.layout
    sampling: dict[str, Any] = {
        "max_tokens": rollout.max_new_tokens,
        "stop_token_ids": sorted(stop_ids(handle.config, tokenizer)),
    }
    if rollout.stop:
        sampling |= {"stop": list(rollout.stop), "include_stop_str_in_output": True}
    if rollout.vllm.servers:
        replays = config.router_replay.enabled
        servers = VllmServers(rollout.vllm.servers, sampling, leads=dist.get_rank() == 0, routes=replays)
        return servers, VllmNccl(servers, layout, weights.timeout)
    options = {
        "model": str(handle.source),
        "dtype": str(sync_dtype(weights, handle)).removeprefix("torch."),
        "max_model_len": rollout.max_prompt_tokens + rollout.max_new_tokens,
        "gpu_memory_utilization": rollout.vllm.memory_fraction,
        "skip_tokenizer_init": not rollout.stop,
        "weight_transfer_config": {"backend": "nccl" if rollout.devices else "same_device"},
        **({"enable_return_routed_experts": True} if config.router_replay.enabled else {}),
        **rollout.vllm.options,
    }
    process = start_vllm(rollout.vllm.python, options, sampling, visible_device(rollout.devices, layout.device))
    way = VllmNccl if rollout.devices else VllmSameDevice
    return process, way(process, layout, weights.timeout)


def visible_device(devices: Sequence[int], device: torch.device) -> str | None:
    """What CUDA_VISIBLE_DEVICES is to be for the engine of this rank, which computes on `device`; None to leave it.

    Args:
        devices: of the engines' own, by their number on the machine; none if each shares its rank's.
        device: this rank's.

    Raises:
        InputError: there are fewer devices for engines than ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if devices:
        local_ranks = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if len(devices) < local_ranks:
            raise InputError(
                f"rollout.devices={list(devices)}: each of the {local_ranks} ranks on a machine needs one: list "
                f"{local_ranks}"
            )
        return str(devices[local_rank])
    if device.type != "cuda":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[device.index] if visible else str(device.index)
