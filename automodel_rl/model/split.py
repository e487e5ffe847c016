"""Cuts a model on the meta device into this rank's pipeline stages."""

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from automodel_rl.compat.nemo import split_by_auto_pipeline
from automodel_rl.config.model import Implementation
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.pipeline.schedules import SCHEDULES, fill_up_to, stages_of_ranks
from automodel_rl.parallel.pipeline.split import layers_per_stage, modules_of_stages


@dataclass(frozen=True)
class Stage:
    """A pipeline stage on this rank; without a pipeline, the whole model.

    Attributes:
        index: the stage's number over all ranks, from 0.
        part: its layers, with embedding and head if it has them.
    """

    index: int
    part: Any


def split_model(model: Any, layout: Layout, implementation: Implementation) -> list[Stage]:
    """Returns this rank's stages in ascending order; none for an outsider. AutoPipeline splits nemo_automodel's
    classes."""
    if layout.is_outsider:
        return []
    parallel = layout.parallel
    if parallel.pp == 1:
        return [Stage(0, model)]
    layers = layers_per_stage(model.config.num_hidden_layers, parallel)
    names = modules_of_stages(layers)
    names[-1].append(f"model.layers.{model.config.num_hidden_layers}")  # the MTP layer, if there is one
    if implementation == "transformers":
        return [Stage(index, keep_modules(model, names[index])) for index in stages_of_ranks(parallel)[layout.pp_rank]]
    # nemo_automodel knows only one schedule with V placement; all of them place stages alike.
    schedule = "ZBVZeroBubble" if SCHEDULES[parallel.schedule].is_v else parallel.schedule
    num_microbatches = fill_up_to(len(layers), parallel)
    stages = split_by_auto_pipeline(model, layout.mesh, layout.device, schedule, names, num_microbatches)
    return [Stage(index, part) for index, part in stages]


def keep_modules(model: nn.Module, names: list[str]) -> nn.Module:
    """Returns a copy with only the named modules, complete. Others become None; lists of layers become dicts by layer
    number."""
    found = copy.deepcopy(model)
    _drop_others(found, "", {*names})
    return found


def _drop_others(parent: nn.Module, prefix: str, kept: set[str]) -> None:
    for name, child in list(parent.named_children()):
        full = prefix + name
        if full in kept:
            continue
        if isinstance(child, nn.ModuleList):
            layers = {str(number): layer for number, layer in enumerate(child) if f"{full}.{number}" in kept}
            setattr(parent, name, nn.ModuleDict(layers))
        elif any(other.startswith(f"{full}.") for other in kept):
            _drop_others(child, f"{full}.", kept)
        else:
            setattr(parent, name, None)
