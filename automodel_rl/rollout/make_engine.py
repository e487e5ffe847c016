"""The engine that a config asks for."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_rl.config import RolloutConfig
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
    return VllmProcess(config.vllm.python or sys.executable, options, sampling, _device(config, handle), folder)


def _device(config: RolloutConfig, handle: ModelHandle) -> str | None:
    """What CUDA_VISIBLE_DEVICES is to be for this rank's vLLM; None to leave it."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.vllm.devices:
        return str(config.vllm.devices[local_rank % len(config.vllm.devices)])
    if handle.layout.device.type != "cuda":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = handle.layout.device.index or torch.cuda.current_device()
    return visible.split(",")[index] if visible else str(index)
