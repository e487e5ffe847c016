"""Floating-point operations of a training step, and the peak they are measured against."""

import torch
from transformers import PreTrainedModel

from automodel_rl.support.description import layer_windows

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 FLOP/s by a word of the device's name (vendors' data sheets, without sparsity)."""


class StepFlops:
    """FLOPs of forward and backward: 6 per active matrix weight and token, 4 if it is frozen, and causal attention
    within each sequence.

    The embedding table is a look-up and left out; the head counts; of experts count as many as a token visits.
    Recomputation is not counted (PaLM, arXiv:2204.02311, appendix B).

    Args:
        model: may be without storage.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config
        self.per_token = 6 * active_weights(model, trained=True) + 4 * active_weights(model, trained=False)
        values = config.to_dict()
        head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        qk_dim = (values.get("qk_nope_head_dim") or 0) + (values.get("qk_rope_head_dim") or 0) or head_dim
        self.per_pair = 6 * config.num_attention_heads * (qk_dim + (values.get("v_head_dim") or head_dim))
        self.windows = layer_windows(config)

    def __call__(self, length: int) -> float:
        """FLOPs of one sequence of `length` tokens."""
        return self.per_token * length + self.per_pair * sum(_pairs(length, window) for window in self.windows)


def active_weights(model: PreTrainedModel, trained: bool) -> float:
    """Matrix weights that one token meets, of those that are trained or of those that are frozen."""
    values = model.config.to_dict()
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith("embed_tokens.weight") or parameter.requires_grad != trained:
            continue
        share = values["num_experts_per_tok"] / len(parameter) if ".experts." in name else 1.0
        total += share * parameter.numel()
    head = model.lm_head.weight
    if head is model.model.embed_tokens.weight and head.requires_grad == trained:
        total += head.numel()
    return total


def _pairs(length: int, window: int | None) -> float:
    """Query-key pairs of a causal sequence."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) / 2 + (length - seen) * seen


def peak_flops(device: torch.device) -> float | None:
    """Peak of one device in FLOP/s, None where it is not known (a CPU, say)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)
