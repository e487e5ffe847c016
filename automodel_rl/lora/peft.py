"""Writes adapters in PEFT's file format."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from automodel_rl.config.model import LoraConfig
from automodel_rl.files import complete_folder
from automodel_rl.lora.layers import ADAPTER, is_adapter
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.sharding import gather_whole
from automodel_rl.support.families import FAMILIES

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterOrigin:
    """The model that adapters belong to.

    Attributes:
        config: the adapters' config.
        base: folder of the checkpoint that they adapt.
        family: the family of its model, a key of `FAMILIES`.
    """

    config: LoraConfig
    base: Path
    family: str


def save_adapters(
    folder: Path,
    parameters: Iterator[tuple[str, nn.Parameter]],
    origin: AdapterOrigin,
    tokenizer: PreTrainedTokenizerBase | None,
    layout: Layout,
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json, which PEFT opens. A collective.

    Args:
        folder: the folder to write; replaced if it exists; on a file system that all ranks share.
        parameters: names and parameters of this rank; only adapters are written.
        origin: the model that the adapters belong to.
        tokenizer: the tokenizer to save along, if given.
        layout: this rank's place.
    """
    own = {name: gather_whole(p, layout).cpu() for name, p in parameters if is_adapter(name)}
    of_stages = gather_objects(own, layout.pp_control)
    with complete_folder(folder, layout.world_control) as unfinished:
        if dist.get_rank() == 0:
            write_adapters(unfinished, {k: v for stage in of_stages for k, v in stage.items()}, origin)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)


def write_adapters(folder: Path, tensors: dict[str, Tensor], origin: AdapterOrigin) -> None:
    """Writes adapters as PEFT does.

    Args:
        folder: a folder that exists.
        tensors: all adapters, by name.
        origin: the model that the adapters belong to.
    """
    named = {f"{PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    layers = sorted({layer for name in tensors for layer in ADAPTER.findall(name)})
    (folder / "adapter_config.json").write_text(json.dumps(_peft_config(layers, origin), indent=2))


def _peft_config(layers: list[str], origin: AdapterOrigin) -> dict[str, Any]:
    """The content of adapter_config.json.

    PEFT applies an entry of `target_modules` to the fused experts if it ends with a name that an expert's weight has in
    files, such as gate_proj. So dense layers and shared experts with such a name are listed in `target_parameters`.
    """
    experts = FAMILIES[origin.family].experts
    of_experts = () if experts is None else (experts.gate, experts.up, experts.down)
    by_weight = [layer for layer in layers if layer.rpartition(".")[2] in of_experts]
    by_name = {layer.rpartition(".")[2] for layer in layers if layer not in by_weight}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(origin.base),
        "r": origin.config.rank,
        "lora_alpha": origin.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(by_name),
        "target_parameters": [f"{layer}.weight" for layer in by_weight],
        "inference_mode": True,
    }
