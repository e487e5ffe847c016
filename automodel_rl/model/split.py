"""Cuts a model on the meta device into this rank's pipeline stages."""

from dataclasses import dataclass
from typing import Any

from automodel_rl.compat.nemo import split_into_stages
from automodel_rl.parallel.layout import Layout
from automodel_rl.parallel.pipeline.schedules import SCHEDULES, fill_up_to
from automodel_rl.parallel.pipeline.split import layers_per_stage, modules_of_stages


@dataclass(frozen=True)
class Stage:
    """A pipeline stage on this rank; without a pipeline there is one, with the whole model.

    Attributes:
        index: the stage's number, from 0 and over all ranks.
        part: its layers, with embedding and head if it has them.
    """

    index: int
    part: Any


def split_model(model: Any, layout: Layout) -> list[Stage]:
    """This rank's stages of a language model, first stage first; none for a guest."""
    if layout.is_guest:
        return []
    parallel = layout.parallel
    if parallel.pp == 1:
        return [Stage(0, model)]
    layers = layers_per_stage(model.config.num_hidden_layers, parallel)
    # nemo_automodel knows only one schedule with V placement; stages lie at the same places in all of them.
    schedule = "ZBVZeroBubble" if SCHEDULES[parallel.schedule].is_v else parallel.schedule
    num_microbatches = fill_up_to(len(layers), parallel)
    names = modules_of_stages(layers)
    stages = split_into_stages(model, layout.mesh, layout.device, schedule, names, num_microbatches)
    return [Stage(index, part) for index, part in stages]
