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
    """FLOPs of forward and backward, after PaLM (arXiv:2204.02311, appendix B).

    They are 6 for each token and active matrix weight, or 4 if the weight is frozen, and those of causal attention
    within each sequence. The head counts; the embedding table does not, for it is only a look-up. As many experts count
    as a token visits. Recomputation does not count.

    Args:
        model: the language model; may be without storage.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config
        self.per_token = 6 * active_weights(model, trained=True) + 4 * active_weights(model, trained=False)
        self.of_attention = AttentionFlops(config)
        # Each token updates every head's state and reads it.
        self.per_token += 3 * 4 * num_mixed_layers(config) * size_of_state(config)

    def __call__(self, length: int) -> float:
        """FLOPs of one sequence of `length` tokens."""
        return self.per_token * length + self.of_attention(length)


class AttentionFlops:
    """FLOPs of causal attention in forward and backward, of all layers.

    Args:
        config: the language model's config. It is read once: packing asks for every sequence.
    """

    def __init__(self, config: PretrainedConfig):
        values = config.to_dict()
        head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        qk_dim = (values.get("qk_nope_head_dim") or 0) + (values.get("qk_rope_head_dim") or 0) or head_dim
        self.per_pair = 6 * config.num_attention_heads * (qk_dim + (values.get("v_head_dim") or head_dim))
        # An indexer scores all keys, in the forward alone; attention then masks those that are not chosen.
        self.per_pair += 2 * values.get("index_n_heads", 0) * values.get("index_head_dim", 0)
        self.windows = layer_windows(config)

    def __call__(self, length: int) -> float:
        """FLOPs of one sequence of `length` tokens."""
        return self.per_pair * sum(_pairs(length, window) for window in self.windows)


def active_weights(model: PreTrainedModel, trained: bool) -> float:
    """Number of matrix weights that one token meets: the trained ones only, or the frozen ones only."""
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
    """Number of query-key pairs in a causal sequence."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) / 2 + (length - seen) * seen


def peak_flops(device: torch.device) -> float | None:
    """Peak of one device in FLOP/s; None if it is not known (for a CPU, say)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)
