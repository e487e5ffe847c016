"""The data of every peer: packed rows of 8,192 tokens or full rows, and what is measured of a loop over steps.

Documents have log-normal lengths (median 700, sigma 1, 64 to 8,192), each ends with the end token, and rows are filled
by best fit. A row's last tokens may be padding, a document of its own without targets; it does not count as tokens.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from automodel_rl.batch import assign_bins

ROW = 8192
WARMUP = 4
WARMUP_OF_ADAPTERS = 3
PEAK = 989e12
"""Dense bf16 FLOP/s of one H200."""


@dataclass(frozen=True)
class Rows:
    """The rows of all steps.

    Attributes:
        ids: token ids, int64 [steps, rows, tokens].
        lengths: tokens of the documents of every row of every step; padding is the last one if `padded` says so.
        padded: whether a row ends with padding.
    """

    ids: Tensor
    lengths: list[list[list[int]]]
    padded: list[list[bool]]

    def labels(self, step: int) -> Tensor:
        """The next token within each document, int64 [rows, tokens]; -100 where there is none."""
        labels = torch.full_like(self.ids[step], -100)
        labels[:, :-1] = self.ids[step][:, 1:]
        for row, (lengths, padded) in enumerate(zip(self.lengths[step], self.padded[step], strict=True)):
            ends = np.cumsum(lengths)
            labels[row, ends - 1] = -100
            if padded:
                labels[row, ends[-2] :] = -100
        return labels

    def documents(self, step: int) -> list[Tensor]:
        """Token ids of the step's documents, without padding."""
        documents: list[Tensor] = []
        for row, (lengths, padded) in enumerate(zip(self.lengths[step], self.padded[step], strict=True)):
            pieces = self.ids[step][row].split(lengths)
            documents += pieces[:-1] if padded else pieces
        return documents


def make_rows(vocab_size: int, rows: int, steps: int, length: int = ROW) -> Rows:
    """Rows with a seed, the fullest of some more than are needed."""
    generator, count, scale = np.random.default_rng(0), rows * steps, length / ROW
    lengths: list[int] = []
    while sum(lengths) < 1.05 * count * length:
        lengths.append(int(np.clip(generator.lognormal(math.log(700 * scale), 1.0), max(4, 64 * scale), length)))
    bins = sorted(assign_bins(lengths, length), key=lambda places: -sum(lengths[p] for p in places))[:count]
    order = generator.permutation(count)
    ids = torch.from_numpy(generator.integers(0, vocab_size - 2, (count, length)))
    of_rows, padded = [], []
    for row, chosen in enumerate(order):
        of_row = [lengths[place] for place in bins[chosen]]
        ids[row, np.cumsum(of_row) - 1] = vocab_size - 1
        missing = length - sum(of_row)
        if missing:
            ids[row, length - missing :] = vocab_size - 2
        of_rows.append(of_row + ([missing] if missing else []))
        padded.append(bool(missing))
    return Rows(
        ids.view(steps, rows, length),
        [of_rows[step * rows : (step + 1) * rows] for step in range(steps)],
        [padded[step * rows : (step + 1) * rows] for step in range(steps)],
    )


def full_rows(vocab_size: int, rows: int, steps: int, length: int) -> Rows:
    """Rows of one document each, all of `length` tokens, with a seed."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size - 2, (steps, rows, length)))
    return Rows(ids, [[[length]] * rows] * steps, [[False] * rows] * steps)


def report_adapters(name: str, base: str, rows: Rows, seconds: list[float], loss: float) -> None:
    """Prints the line of a finished measurement of adapters.

    Args:
        name: the peer.
        base: lora or qlora.
        rows: the data, full rows.
        seconds: time of every step.
        loss: of the first step.
    """
    median = statistics.median(seconds[WARMUP_OF_ADAPTERS:])
    cuda = torch.cuda.is_available()
    result = {
        "peer": name,
        "base": base,
        "rows": list(rows.ids.shape[1:]),
        "tokens_per_second": round(rows.ids[0].numel() / median),
        "step_s": round(median, 3),
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else 0.0,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1) if cuda else 0.0,
        "loss1": round(loss, 5),
        "first_step_s": round(seconds[0], 1),
        "spread_s": [round(min(seconds[WARMUP_OF_ADAPTERS:]), 3), round(max(seconds[WARMUP_OF_ADAPTERS:]), 3)],
    }
    print(json.dumps(result), flush=True)


def report(
    name: str, folder: Path, rows: Rows, seconds: list[float], first: tuple[float, float], microbatch: int
) -> None:
    """Prints the line of a finished measurement.

    Args:
        name: the peer.
        folder: the checkpoint's folder.
        rows: the data.
        seconds: time of every step.
        first: loss and gradient norm of the first step.
        microbatch: tokens of a microbatch.
    """
    config = json.loads((folder / "config.json").read_text())
    documents = [rows.documents(step) for step in range(WARMUP, len(seconds))]
    tokens = sum(sum(map(len, step)) for step in documents) / len(documents)
    pairs = sum(sum(len(d) * (len(d) + 1) / 2 for d in step) for step in documents) / len(documents)
    median = statistics.median(seconds[WARMUP:])
    flops = 6 * _active_parameters(config) * tokens
    flops += 12 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"] * pairs
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    result = {
        "peer": name,
        "microbatch": microbatch,
        "tokens_per_second": round(tokens / median),
        "mfu_percent": round(100 * flops / median / PEAK, 1),
        "gib": round(peak, 1),
        "loss1": round(first[0], 5),
        "gnorm1": round(first[1], 4),
        "first_step_s": round(seconds[0], 1),
        "spread_s": [round(min(seconds[WARMUP:]), 3), round(max(seconds[WARMUP:]), 3)],
    }
    print(json.dumps(result), flush=True)


def _active_parameters(config: dict) -> int:
    """Weights that multiply each token, the head included and the embedding not."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * hidden * config["head_dim"] * heads
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        layer += hidden * (3 * config["moe_intermediate_size"] * config["num_experts_per_tok"] + experts)
    else:
        layer += 3 * hidden * config["intermediate_size"]
    return config["num_hidden_layers"] * layer + hidden * config["vocab_size"]


def timed(step: Callable[[], object]) -> float:
    """Seconds of a step, with the device synchronised at its edges."""
    synchronize()
    started = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
