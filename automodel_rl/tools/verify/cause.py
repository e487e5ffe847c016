"""Likeliest cause of differences: the first thing in a step that differs, as later differences follow from it."""

import itertools
import re
from collections.abc import Callable, Collection

from automodel_rl.config import ParallelConfig
from automodel_rl.parallel.pipeline.split import layers_per_stage
from automodel_rl.tools.verify.comparison import NO_STEP, Differences

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

ENDS = ("embed_tokens", "lm_head")

ALONE = {
    "choices of experts": "router replay: the positions of routes in microbatches, or their layers",
    "reference log-probabilities": "the reference weights: not every part is swapped, or not swapped back",
    "exported tensors": "the export: names, gathering or merging of tensors",
}
"""Causes of differences in quantities that are compared outside of steps."""


def likeliest_cause(found: Differences, is_equal: Callable[[str, int, float], bool], parallel: ParallelConfig) -> str:
    """Returns a line that says where to look for the cause.

    Args:
        is_equal: whether (kind, step, difference) counts as equal.
        parallel: layout of the language model.
    """
    steps = sorted({step for by_step in found.found.values() for step in by_step} - {NO_STEP})
    for step in steps:
        names = {
            kind: {name for name, difference in by_step.get(step, {}).items() if not is_equal(kind, step, difference)}
            for kind, by_step in found.found.items()
        }
        different = {kind: of_kind for kind, of_kind in names.items() if of_kind}
        if different:
            return f"step {step}: {_cause(different, found, step, parallel)}"
    for kind, by_step in found.found.items():
        if NO_STEP in by_step and not is_equal(kind, NO_STEP, found.largest(kind, NO_STEP)):
            return ALONE.get(kind, f"{kind} alone")
    return "rounding"


def _cause(different: dict[str, set[str]], found: Differences, step: int, parallel: ParallelConfig) -> str:
    gradients = {kind: names for kind, names in different.items() if kind.startswith("gradient of ")}
    if "log-probabilities" in different:
        if step == 1:
            return "the forward pass: attention masks, positions, loaded weights, or messages between stages"
        return "the forward pass after an optimizer step: stale gathered weights"
    if gradients:
        return _cause_of_gradients(gradients, found, step, parallel)
    if "loss" in different:
        return "the loss alone: its counts, or sums over ranks"
    if "evaluated loss" in different:
        return "evaluation alone: its counts, or its microbatches"
    if "gradient norm" in different:
        return "the global norm alone: some ranks' gradients are missing or counted twice"
    if "learning rate" in different:
        return "the learning-rate schedule"
    where = _stages(different.get("weights", ()), found, parallel)
    return f"the optimizer step{where}: clipping, or the optimizer's settings, because gradients and norm are equal"


def _cause_of_gradients(gradients: dict[str, set[str]], found: Differences, step: int, parallel: ParallelConfig) -> str:
    names = set().union(*gradients.values())
    all_names = {
        name for kind, by_step in found.found.items() if kind.startswith("gradient of ") for name in by_step[step]
    }
    if names == all_names:
        return "all gradients: their sum over data ranks, or the divisor of the losses"
    if all(".experts." in name for name in names):
        return "gradients of experts alone: their sum over the ranks that share them"
    if all(any(end in name for end in ENDS) for name in names):
        return "gradients of the embedding and the head: the sum of a tied weight's two copies"
    if all("norm" in name or name.endswith("bias") for name in names):
        return "gradients of norms and biases alone: their sum over tp ranks"
    if not any(name.startswith("model.layers.") or any(end in name for end in ENDS) for name in names):
        return "gradients of the encoder alone: the transfer of embeddings, or their sum over its ranks"
    return f"gradients{_stages(names, found, parallel)}: the backward pass, or messages between stages"


def _stages(names: Collection[str], found: Differences, parallel: ParallelConfig) -> str:
    """Text with the stages of the named tensors; empty if all stages are affected."""
    layers = _layers(names)
    if parallel.pp == 1 or not layers:
        return ""
    everywhere = _layers([name for by_name in found.found["weights"].values() for name in by_name])
    ends = list(itertools.accumulate(layers_per_stage(max(everywhere) + 1, parallel)))
    stages = sorted({next(stage for stage, end in enumerate(ends) if layer < end) for layer in layers})
    return "" if len(stages) == len(ends) else f" of stage {', '.join(map(str, stages))}"


def _layers(names: Collection[str]) -> set[int]:
    return {int(match.group(1)) for name in names if (match := LAYER.search(name))}
