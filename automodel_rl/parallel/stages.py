"""Which layers each pipeline stage holds."""

import itertools

from automodel_rl.config import ParallelConfig
from automodel_rl.errors import InputError


def layers_per_stage(num_layers: int, parallel: ParallelConfig) -> tuple[int, ...]:
    """Number of layers of every stage, as configured or as even as possible with the last stages shortest.

    Raises:
        InputError: more stages than layers, or a list that does not add up.
    """
    given = parallel.layers_per_stage
    if given is None:
        if parallel.pp > num_layers:
            raise InputError(
                f"parallel.pp={parallel.pp}: the model has {num_layers} layers and a stage needs at least one; "
                f"use pp <= {num_layers}"
            )
        shortest, extra = divmod(num_layers, parallel.pp)
        return tuple(shortest + (stage < extra) for stage in range(parallel.pp))
    if len(given) != parallel.pp:
        raise InputError(
            f"parallel.layers_per_stage={list(given)} lists {len(given)} stages but parallel.pp={parallel.pp}: "
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
