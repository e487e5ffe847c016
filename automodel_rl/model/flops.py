"""Floating-point operations of a training step, and the peak they are measured against."""

import torch
from transformers import PretrainedConfig

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 FLOP/s by a word of the device's name (vendors' data sheets, without sparsity)."""


class StepFlops:
    """FLOPs of forward and backward: 6 per parameter and token, and causal attention within each sequence.

    The embedding table is a look-up and left out; the head counts. Recomputation is not counted (PaLM,
    arXiv:2204.02311, appendix B).
    """

    def __init__(self, config: PretrainedConfig):
        values = config.to_dict()
        head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        kv_heads = values.get("num_key_value_heads") or config.num_attention_heads
        attention = config.hidden_size * head_dim * (2 * config.num_attention_heads + 2 * kv_heads)
        mlp = 3 * config.hidden_size * config.intermediate_size
        head = config.vocab_size * config.hidden_size
        self.per_token = 6 * (config.num_hidden_layers * (attention + mlp) + head)
        self.per_pair = 12 * config.num_hidden_layers * config.num_attention_heads * head_dim

    def __call__(self, length: int) -> float:
        """FLOPs of one sequence of `length` tokens."""
        return self.per_token * length + self.per_pair * length * (length + 1) / 2


def peak_flops(device: torch.device) -> float | None:
    """Peak of one device in FLOP/s, None where it is not known (a CPU, say)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)
