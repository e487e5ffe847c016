"""The head alone: hidden states to log-probabilities, forward and backward, against its matrix products.

    python benchmarks/head.py

For 8,192 tokens of 2,048 dims in bf16 and two vocabularies: milliseconds (median of 20) and the memory that is added to
inputs and gradients. `linear` is a loss whose gradient is known before the forward (sft), `policy` any other, `entropy`
one that reads entropies at a temperature. A linear loss needs three products, the others four.
"""

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable

import torch

from automodel_rl import TokenSequence
from automodel_rl.batch import LocalMicrobatch, local_microbatch, pack_microbatch
from automodel_rl.batch.tensors import LOGPROB_GRADIENT
from automodel_rl.losses import Readout
from automodel_rl.model.head import Head
from automodel_rl.model.logprobs import target_readout

TOKENS, HIDDEN = 8192, 2048


def main() -> None:
    for vocab in (32768, 151936):
        states = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16().requires_grad_()
        weight = (torch.randn(vocab, HIDDEN, device="cuda") * 0.02).bfloat16()
        total = torch.zeros(vocab, HIDDEN, device="cuda")
        ids = torch.randint(0, vocab, (TOKENS,))
        microbatch = local_microbatch(pack_microbatch([TokenSequence(ids, torch.ones(TOKENS, dtype=torch.bool))]))
        microbatch = microbatch.to(torch.device("cuda"))
        known = torch.full((TOKENS,), -1 / TOKENS, dtype=torch.float64, device="cuda")
        informed = dataclasses.replace(microbatch, tokens={LOGPROB_GRADIENT: known})
        cases = {
            "linear": (informed, Readout()),
            "policy": (microbatch, Readout()),
            "entropy": (microbatch, Readout(0.7, entropy=True)),
        }
        products = product_times(states.detach(), weight)
        for name, (given, readout) in cases.items():
            head = Head(
                weight,
                gradient=lambda: total,  # noqa: B023
                compiled=True,
            )

            milliseconds, added = measure(functools.partial(forward_backward, states, head, given, readout))
            needed = products if name == "linear" else products * 4 / 3
            result = {"vocab": vocab, "loss": name, "ms": milliseconds, "products_ms": round(needed, 2)}
            print(json.dumps({**result, "ratio": round(milliseconds / needed, 2), "added_gib": added}), flush=True)


def forward_backward(states: torch.Tensor, head: Head, microbatch: LocalMicrobatch, readout: Readout) -> None:
    target_readout(states, head, microbatch, readout).sum().backward()


def product_times(states: torch.Tensor, weight: torch.Tensor) -> float:
    """Milliseconds of the three products at their full size, in bf16."""
    d_products = torch.empty(TOKENS, len(weight), dtype=torch.bfloat16, device="cuda").normal_()
    pairs = [(states, weight.t()), (d_products, weight), (d_products.t(), states)]
    return sum(measure(functools.partial(torch.mm, *pair))[0] for pair in pairs)


def measure(run: Callable[[], object]) -> tuple[float, float]:
    times = []
    for _ in range(3):
        run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    added = (torch.cuda.max_memory_allocated() - before) / 2**30
    return round(statistics.median(times), 2), round(added, 2)


if __name__ == "__main__":
    main()
