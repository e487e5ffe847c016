"""Floating-point operations of a training step, and the peak they are measured against."""

import torch
from transformers import PretrainedConfig, PreTrainedModel

from automodel_rl.support.description import (
    experts_per_token,
    layer_windows,
    num_mixed_layers,
    size_of_state,
)

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 FLOP/s by a word of the device's name (vendors' data sheets, without sparsity)."""


class StepFlops:
    """FLOPs of forward and backward for a sequence, after PaLM (arXiv:2204.02311, appendix B).

    Each token costs 6 FLOPs per active matrix weight, 4 if it is frozen; causal attention is added. The head counts;
    the embedding look-up and recomputation do not. The model may be without storage.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config
        self.per_token = 6 * active_weights(model, trained=True) + 4 * active_weights(model, trained=False)
        self.of_attention = AttentionFlops(config)
        # Each token writes and reads every head's state.
        self.per_token += 3 * 4 * num_mixed_layers(config) * size_of_state(config)

    def __call__(self, length: int) -> float:
        return self.per_token * length + self.of_attention(length)


class AttentionFlops:
    """FLOPs of causal attention over all layers, forward and backward. The config is read once: packing calls this
    often."""

    def __init__(self, config: PretrainedConfig):
        values = config.to_dict()
        head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        qk_dim = (values.get("qk_nope_head_dim") or 0) + (values.get("qk_rope_head_dim") or 0) or head_dim
        self.per_pair = 6 * config.num_attention_heads * (qk_dim + (values.get("v_head_dim") or head_dim))
        # An indexer scores all keys, in the forward only; attention then masks those not chosen.
        self.per_pair += 2 * values.get("index_n_heads", 0) * values.get("index_head_dim", 0)
        self.windows = layer_windows(config)

    def __call__(self, length: int) -> float:
        return self.per_pair * sum(_pairs(length, window) for window in self.windows)


def active_weights(model: PreTrainedModel, trained: bool) -> float:
    """Returns the number of trained, or of frozen, matrix weights that one token passes through."""
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith("embed_tokens.weight") or parameter.requires_grad != trained:
            continue
        share = experts_per_token(model.config) / len(parameter) if ".experts." in name else 1.0
        total += share * parameter.numel()
    head = model.lm_head.weight
    if head is model.model.embed_tokens.weight and head.requires_grad == trained:
        total += head.numel()
    return total


def _pairs(length: int, window: int | None) -> float:
    """Returns the number of query-key pairs in a causal sequence."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) / 2 + (length - seen) * seen


def peak_flops(device: torch.device) -> float | None:
    """Returns the peak FLOP/s of a device; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)
