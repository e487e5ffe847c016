"""Number of layers of each pipeline stage."""

import itertools

from automodel_rl.config import ParallelConfig
from automodel_rl.errors import InputError


def refuse_split(num_layers: int, parallel: ParallelConfig) -> str | None:
    """Returns why layers cannot be split as configured (too few, or a list that does not fit); None if they can."""
    given, stages = parallel.layers_per_stage, parallel.num_stages
    sizes = f"parallel.pp={parallel.pp}"
    if parallel.virtual_stages > 1:
        sizes += f" x parallel.virtual_stages={parallel.virtual_stages}"
    if given is None and stages > num_layers:
        return (
            f"{sizes}: the model has {num_layers} layers and a stage needs at least one; "
            f"use no more than {num_layers} stages"
        )
    if given is not None and len(given) != stages:
        return (
            f"parallel.layers_per_stage={list(given)} lists {len(given)} stages but {sizes} makes {stages}: "
            "list one number for each stage"
        )
    if given is not None and sum(given) != num_layers:
        return (
            f"parallel.layers_per_stage={list(given)} adds up to {sum(given)} but the model has {num_layers} layers: "
            "make the sum equal"
        )
    return None


def layers_per_stage(num_layers: int, parallel: ParallelConfig) -> tuple[int, ...]:
    """Returns the number of layers of every stage: as configured, or as even as possible with the shortest stages
    last.

    Raises:
        InputError: there are more stages than layers, or the configured list does not add up.
    """
    refusal = refuse_split(num_layers, parallel)
    if refusal is not None:
        raise InputError(refusal)
    if parallel.layers_per_stage is not None:
        return parallel.layers_per_stage
    shortest, extra = divmod(num_layers, parallel.num_stages)
    return tuple(shortest + (stage < extra) for stage in range(parallel.num_stages))


def modules_of_stages(layers: tuple[int, ...]) -> list[list[str]]:
    """Returns the module names of every stage. All have the rotary embedding; the first embeds tokens, the last has
    the head."""
    bounds = [0, *itertools.accumulate(layers)]
    stages = [[f"model.layers.{i}" for i in range(a, b)] + ["model.rotary_emb"] for a, b in itertools.pairwise(bounds)]
    stages[0].append("model.embed_tokens")
    stages[-1] += ["model.norm", "lm_head"]
    return stages
