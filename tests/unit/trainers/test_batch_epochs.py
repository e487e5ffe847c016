"""The order of further passes over the completions of a step."""

from typing import Any

from automodel_rl.trainers import batch_epochs


def test_every_pass_of_every_step_and_seed_has_an_order_of_its_own() -> None:
    groups: list[Any] = list(range(30))
    places = [(seed, step, epoch) for seed in (0, 1) for step in (1, 2, 11) for epoch in (1, 2)]
    orders = [tuple(batch_epochs.shuffled(groups, *place)) for place in places]
    assert len({*orders, tuple(groups)}) == len(orders) + 1
    assert all(sorted(order) == groups for order in orders)
    assert [tuple(batch_epochs.shuffled(groups, *place)) for place in places] == orders
    assert groups == list(range(30))
