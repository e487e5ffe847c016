"""Which layers each pipeline stage holds."""

import itertools

from automodel_rl.config import ParallelConfig
from automodel_rl.errors import InputError


def layers_per_stage(num_layers: int, parallel: ParallelConfig) -> tuple[int, ...]:
    """Number of layers of every stage, as configured or as even as possible with the last stages shortest.

    Raises:
        InputError: more stages than layers, or a list that does not add up.
    """
    given, stages = parallel.layers_per_stage, parallel.num_stages
    sizes = f"parallel.pp={parallel.pp}"
    if parallel.virtual_stages > 1:
        sizes += f" x parallel.virtual_stages={parallel.virtual_stages}"
    if given is None:
        if stages > num_layers:
            raise InputError(
                f"{sizes}: the model has {num_layers} layers and a stage needs at least one; "
                f"use no more than {num_layers} stages"
            )
        shortest, extra = divmod(num_layers, stages)
        return tuple(shortest + (stage < extra) for stage in range(stages))
    if len(given) != stages:
        raise InputError(
            f"parallel.layers_per_stage={list(given)} lists {len(given)} stages but {sizes} makes {stages}: "
            "list one number for each stage"
        )
    if sum(given) != num_layers:
        raise InputError(
            f"parallel.layers_per_stage={list(given)} adds up to {sum(given)} but the model has {num_layers} layers: "
            "make the sum equal"
        )
    return given


def modules_of_stages(layers: tuple[int, ...]) -> list[list[str]]:
    """Module names of every stage. Each has the rotary embedding; the first embeds tokens, the last has the head."""
    bounds = [0, *itertools.accumulate(layers)]
    stages = [[f"model.layers.{i}" for i in range(a, b)] + ["model.rotary_emb"] for a, b in itertools.pairwise(bounds)]
    stages[0].append("model.embed_tokens")
    stages[-1] += ["model.norm", "lm_head"]
    return stages
