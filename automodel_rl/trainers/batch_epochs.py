"""Further passes over the completions of a step, each of which deals their groups to the optimizer steps anew."""

import random
from collections.abc import Iterator, Sequence

from torch import Tensor

from automodel_rl.batch import Microbatch, add_values, unpack
from automodel_rl.data.loader import PackedStep
from automodel_rl.parallel.host_collectives import gather_objects
from automodel_rl.parallel.layout import Layout
from automodel_rl.rollout.groups import Group
from automodel_rl.trainers.policy_batches import Microbatches, rollouts_of_optimizer_step

Values = dict[int, dict[str, Tensor]]
"""Per-token tensors of every rollout of a batch, each at the token that it describes, by the rollout's number."""


def shuffled(groups: Sequence[Group], seed: int, step: int, epoch: int) -> list[Group]:
    """The groups in the order of a further pass, the same on every rank and in a resumed run."""
    return random.Random(f"{seed} {step} {epoch}").sample(groups, len(groups))


def values_of(groups: Sequence[Group], optimizer_steps: Sequence[Microbatches], layout: Layout) -> Values:
    """What the microbatches of the first pass hold for every rollout. A collective of the data ranks.

    Args:
        groups: the groups that were packed; rollouts are numbered in their order.
        optimizer_steps: this data rank's microbatches of each optimizer step, with all values.
        layout: this rank's place.
    """
    numbers, own = _numbers(groups), {}
    for step, microbatches in enumerate(optimizer_steps):
        rollouts = rollouts_of_optimizer_step(groups, step, len(optimizer_steps))
        for microbatch in microbatches:
            split = {name: unpack(values, microbatch) for name, values in microbatch.values.items()}
            for number, place in enumerate(microbatch.order):
                own[numbers[id(rollouts[place][1])]] = {name: pieces[number] for name, pieces in split.items()}
    shares = gather_objects(own, layout.data_control)
    return {number: values for share in shares for number, values in share.items()}


def with_values(
    groups: Sequence[Group], shuffled_groups: Sequence[Group], packed: Sequence[PackedStep], values: Values
) -> Iterator[Microbatches]:
    """The microbatches of each optimizer step of a further pass, with the values of their rollouts.

    Args:
        groups: the groups in the order of the first pass.
        shuffled_groups: the same in the order of this pass.
        packed: the result of `pack_optimizer_steps` for this order.
        values: the result of `values_of`.
    """
    numbers = _numbers(groups)
    for step, one in enumerate(packed):
        rollouts = rollouts_of_optimizer_step(shuffled_groups, step, len(packed))
        order = [numbers[id(rollout)] for _, rollout in rollouts]
        yield [_with_values(microbatch, order, values) for microbatch in one.microbatches]


def _with_values(microbatch: Microbatch, order: Sequence[int], values: Values) -> Microbatch:
    """The microbatch with the values of its rollouts, given the number of the rollout at each place."""
    for name in next(iter(values.values())):
        microbatch = add_values(microbatch, name, [values[order[place]][name] for place in microbatch.order])
    return microbatch


def _numbers(groups: Sequence[Group]) -> dict[int, int]:
    """The number of every rollout, by its identity."""
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    return {id(rollout): number for number, rollout in enumerate(rollouts)}
