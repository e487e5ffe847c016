"""The model copy of a transformers generator: builds it, and lists its tensors for weight syncs."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig

from automodel_rl.config.model import LoraConfig
from automodel_rl.data.media import MediaReaders
from automodel_rl.errors import InputError
from automodel_rl.families.known import CheckpointFamily
from automodel_rl.hf.names import to_hf
from automodel_rl.hf.read import persistent_tensors
from automodel_rl.lora.add import add_adapters
from automodel_rl.lora.layers import install_adapters, is_adapter
from automodel_rl.mixture.experts import EXPERTS, experts_of, register_experts, transpose_experts
from automodel_rl.mixture.routers import RouterOutput, in_order, routers_of
from automodel_rl.model.encoder import language_model
from automodel_rl.model.part_forward import numbered_layers
from automodel_rl.support.description import describe_model


@dataclass(frozen=True)
class ModelCopy:
    """Description of the copy.

    Attributes:
        config: of the whole trained model.
        family: the trained model's, whose names weight syncs use.
        dtype: compute dtype.
        adapters: if only adapters are synced: their config, and the checkpoint of the frozen model to load.
            Otherwise the copy has no weights until the first weight sync.
        capture_routes: record the experts of tokens.
        media: reads the media of prompts; None for a text-only model.
    """

    config: PretrainedConfig
    family: CheckpointFamily
    dtype: torch.dtype
    device: torch.device
    adapters: tuple[LoraConfig, Path] | None = None
    capture_routes: bool = False
    media: MediaReaders | None = None


def build_model(copy: ModelCopy) -> Any:
    """Builds the copy on its device. Raises InputError if memory is insufficient."""
    config = type(copy.config).from_dict(
        copy.config.to_dict()
    )  # a copy: the trained model's config names its own attention
    # transformers' sdpa ignores soft caps and sinks, and its grouped_mm does not support float64.
    kernels: dict[str, Any] = {"attn_implementation": "eager" if describe_model(config).lacks_sdpa else "sdpa"}
    whole = AutoModelForCausalLM if copy.media is None else AutoModelForMultimodalLM
    if copy.family.file_names.files_transpose_experts:
        register_experts()
        kernels["experts_implementation"] = {"text_config": EXPERTS}  # accepts experts in the layout of files
    elif copy.family.language.is_moe and copy.dtype == torch.float64:
        kernels["experts_implementation"] = "eager"
    with torch.device("meta"):
        empty = whole.from_config(config, dtype=copy.dtype, **kernels)
    _check_room(sum(p.numel() * p.element_size() for p in empty.parameters()), copy.device)
    if copy.adapters is None:
        with torch.device(copy.device):
            model = whole.from_config(config, dtype=copy.dtype, **kernels).eval()
        if copy.family.file_names.files_transpose_experts:
            transpose_experts(model, copy.family.language)
            _without_ep(model)
        return model
    lora, base = copy.adapters
    if lora.has_experts:
        register_experts()
        kernels["experts_implementation"] = EXPERTS  # supports adapters
    model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=copy.dtype, **kernels).eval()
    add_adapters(model, lora)
    model.to(copy.device)
    install_adapters(model)
    _without_ep(model)
    return model


def _without_ep(model: nn.Module) -> None:
    """Turns off expert parallelism in `experts_forward`."""
    for experts in experts_of(model):
        experts.ep_group = None


def synced_tensors(model: nn.Module, copy: ModelCopy) -> dict[str, Tensor]:
    """Returns the tensors that weight syncs write, by their Hugging Face names."""
    return {
        piece: view
        for name, tensor in persistent_tensors(model)
        if copy.adapters is None or is_adapter(name)
        for piece, view in to_hf(_in_parts(name), tensor.detach(), copy.family)
    }


def _in_parts(name: str) -> str:
    """Returns a tensor's name in the trained model, where the language model of a multimodal model has the names of a
    causal language model, and encoders are below `model`."""
    return re.sub(r"^(visual|audio_tower)\.", r"model.\1.", re.sub(r"^model\.language_model\.", "model.", name))


class RouteRecorder:
    """Records the choices of a model's routers."""

    def __init__(self, routers: dict[int, Any]):
        self._chosen: list[Tensor] = []
        for number in sorted(routers):
            routers[number].register_forward_hook(self._note)

    @classmethod
    def of(cls, model: Any, family: CheckpointFamily) -> "RouteRecorder | None":
        routers = routers_of(numbered_layers(language_model(model)), family.language)
        return cls(routers) if routers else None

    def _note(self, _: nn.Module, __: Any, output: RouterOutput) -> None:
        self._chosen.append(in_order(output)[2])

    def take(self, num_sequences: int) -> np.ndarray:
        """Returns the experts of the last forward: int16 [sequences, n, M, K], for sequences of n tokens, M layers
        with routers and K experts per token."""
        chosen = torch.stack(self._chosen, 1).short().cpu().numpy()
        self._chosen.clear()
        return chosen.reshape(num_sequences, -1, *chosen.shape[1:])


def _check_room(num_bytes: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes > 0.9 * free:
        raise InputError(
            f"rollout.generator=transformers: a copy of the model takes {num_bytes / 2**30:.0f} GiB, but {device} "
            f"has {free / 2**30:.0f} GiB free: use rollout.generator=vllm with devices as its place, or servers"
        )
