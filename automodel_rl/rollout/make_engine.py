"""The engine that a config asks for."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.config import RolloutConfig
from automodel_rl.errors import InputError
from automodel_rl.model.handle import ModelHandle
from automodel_rl.rollout.protocol import RolloutEngine
from automodel_rl.rollout.transformers_engine import TransformersEngine, stop_ids
from automodel_rl.rollout.vllm_engine import VllmProcess, VllmServers


def make_engine(config: RolloutConfig, handle: ModelHandle, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """Starts this rank's engine; its weights come with `load_weights`."""
    if config.engine == "transformers":
        return TransformersEngine(
            handle.config,
            handle.dtype,
            handle.layout.device,
            tokenizer,
            config.max_new_tokens,
            config.stop,
            config.batch_size,
        )
    sampling: dict[str, Any] = {
        "max_tokens": config.max_new_tokens,
        "stop_token_ids": sorted(stop_ids(handle.config, tokenizer)),
    }
    if config.stop:
        sampling |= {"stop": list(config.stop), "include_stop_str_in_output": True}
    folder = Path(config.vllm.weights_folder) if config.vllm.weights_folder else None
    if config.vllm.servers:
        return VllmServers(config.vllm.servers, sampling, dist.get_rank() == 0, folder)
    options = {
        "model": str(handle.source),
        "dtype": str(handle.dtype).removeprefix("torch."),
        "max_model_len": config.max_prompt_tokens + config.max_new_tokens,
        "gpu_memory_utilization": config.vllm.memory_fraction,
        "skip_tokenizer_init": not config.stop,
        **config.vllm.options,
    }
    return VllmProcess(
        config.vllm.python or sys.executable, options, sampling, device_of_vllm(config, handle.layout.device), folder
    )


def device_of_vllm(config: RolloutConfig, device: torch.device) -> str | None:
    """What CUDA_VISIBLE_DEVICES is to be for the vLLM of this rank, which computes on `device`; None to leave it.

    Raises:
        InputError: there are fewer devices for engines than ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    devices = config.vllm.devices
    if devices:
        local_ranks = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if len(devices) < local_ranks:
            raise InputError(
                f"rollout.vllm.devices={list(devices)}: each of the {local_ranks} ranks on a machine needs one: list "
                f"{local_ranks}"
            )
        return str(devices[local_rank])
    if device.type != "cuda":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[device.index] if visible else str(device.index)
