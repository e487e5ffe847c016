"""Differences between versions and builds of vLLM, for the files that run in its environment.

    before 0.25   vLLM's worker begins and ends a reload of the layers, and gives the weight transfer a `load_weights`
    from 0.25     the weight transfer does both, and loads into its own `model`
    from 0.28     a tied head is a layer of its own, which a reload skips; on a CPU it computes with packed weights
    from 0.32     a model with layers for multi-token prediction rejects a partial load, unless the check is disabled

Checked against the sources of vLLM 0.23 to 0.33; 0.23 and 0.33 were run on GPUs, 0.32 on a CPU. Like the files that
use it, this one imports nothing of this package.
"""

import contextlib
import importlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TESTED = ((0, 23), (0, 33))
Weights = list[tuple[str, "torch.Tensor"]]


def untested(version: str) -> str:
    """Returns a warning about an untested version; empty for a tested one."""
    parts = version.split(".")
    known = len(parts) > 1 and all(part.isdecimal() for part in parts[:2])
    if known and TESTED[0] <= (int(parts[0]), int(parts[1])) <= TESTED[1]:
        return ""
    first, last = (".".join(map(str, tested)) for tested in TESTED)
    return f"warning: automodel_rl was not tested with vLLM {version}, only with {first} to {last}"


def know_model(folder: str) -> None:
    """Imports the class of a checkpoint's model. Otherwise vLLM inspects it in another process, which with an empty
    cache takes a quarter of a minute. Errors are left for vLLM to report."""
    with contextlib.suppress(Exception):
        registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
        for name in json.loads(Path(folder, "config.json").read_text())["architectures"]:
            registry.register_model(name, registry.models[name].load_model_cls())


def be_quiet() -> None:
    """Suppresses vLLM's messages in every weight sync: that its cache is empty, and that layers "Failed to load
    weights" that syncs skip, such as tied heads, position tables and frozen layers. Its log-probabilities show whether
    its weights are right."""
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.WARNING)
    reload = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    reload.addFilter(lambda record: "Failed to load weights" not in record.msg)


def begin_reload(model: "torch.nn.Module") -> None:
    """Makes layers accept weights in the format of checkpoints. For vLLM from 0.25 on."""
    if _is_on_cpu():
        _forget_kernels(model)
    importlib.import_module("vllm.model_executor.model_loader.reload").initialize_layerwise_reload(model)


def end_reload(model: "torch.nn.Module", model_config: Any) -> None:
    """Converts layers to the format in which they compute. For vLLM from 0.25 on."""
    importlib.import_module("vllm.model_executor.model_loader.reload").finalize_layerwise_reload(model, model_config)
    if _is_on_cpu():
        _pack_heads(model)


def _is_on_cpu() -> bool:
    return not importlib.import_module("torch").accelerator.is_available()


def _forget_kernels(model: "torch.nn.Module") -> None:
    """Makes MoE layers create their kernels anew. A CPU pads and packs the weights of experts only with a new kernel;
    an old one would use plain weights as packed ones (0.32)."""
    methods = importlib.import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
    for module in model.modules():
        if isinstance(module, methods.UnquantizedFusedMoEMethod):
            module.moe_kernel = None


def _pack_heads(model: "torch.nn.Module") -> None:
    """Packs the weights of heads for a CPU. A reload skips a tied head, which would keep its first copy."""
    heads = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding").ParallelLMHead
    for layer in model.modules():
        if isinstance(layer, heads):
            layer.quant_method.process_weights_after_loading(layer)


def load(weights: Weights, model: "torch.nn.Module", load_weights: Callable[[Weights], Any] | None) -> None:
    """Loads some of a model's weights, by checkpoint names. `load_weights` is from vLLM's worker before 0.25."""
    if load_weights is not None:
        load_weights(weights)
        return
    with _of_a_part():
        model.load_weights(weights)  # type: ignore[operator]


def _of_a_part() -> AbstractContextManager[Any]:
    try:
        module = importlib.import_module("vllm.model_executor.model_loader.mtp_validation")
    except ModuleNotFoundError:  # before 0.32
        return contextlib.nullcontext()
    return module.disable_mtp_completeness_check()
