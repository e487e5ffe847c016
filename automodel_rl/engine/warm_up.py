"""Compilation before the first step, while the process waits for something else."""

import torch

from automodel_rl.batch import Microbatch, TokenSequence, pack_microbatch
from automodel_rl.engine.engine import Engine
from automodel_rl.losses import sft_loss

NUM_TOKENS = 2048
"""Tokens of the warm-up microbatch, enough for the compiler to choose kernels for large inputs."""

NUM_SEQUENCES = 2

SPARE_BYTES = 2**31
"""Device memory reserved beforehand for activations of the warm-up."""


def warm_up(engine: Engine, max_tokens: int) -> None:
    """Compiles the layers' graphs, with and without gradients, by running a dummy microbatch of at most `max_tokens`
    tokens. Does nothing if layers are not compiled, or gradients of a step exist. A collective.

    Its memory is reserved at once and kept by torch's allocator, so as not to disturb another process that is
    measuring its share of the device.
    """
    if not engine.handle.memory.compile or engine.has_gradients:
        return
    _take_memory(engine)
    length = min(NUM_TOKENS, max_tokens) // NUM_SEQUENCES
    microbatches = [] if engine.handle.layout.is_outsider else [_some_tokens(engine, length)]
    device = engine.handle.layout.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # adapters may have dropout
        engine.logprobs(microbatches)
        engine.forward_backward(microbatches, sft_loss)
    engine.zero_grad()


def _some_tokens(engine: Engine, length: int) -> Microbatch:
    ids = torch.arange(NUM_SEQUENCES * length) % engine.handle.config.vocab_size
    trained = torch.ones(length, dtype=torch.bool)
    return pack_microbatch([TokenSequence(of_one, trained) for of_one in ids.split(length)])


def _take_memory(engine: Engine) -> None:
    """Reserves memory for gradients and activations in torch's allocator."""
    device = engine.handle.layout.device
    if device.type != "cuda":
        return
    gradients = sum(
        p.numel() * p.element_size() for part in engine.handle.parts for p in part.parameters() if p.requires_grad
    )
    free, _ = torch.cuda.mem_get_info(device)
    torch.empty(min(gradients + SPARE_BYTES, free // 4), dtype=torch.uint8, device=device)
