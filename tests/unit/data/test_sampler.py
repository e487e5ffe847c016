"""The stream of draws: exact epochs, exact shares, the same on every rank."""

from itertools import islice

from automodel_rl.batch import DataShare
from automodel_rl.data.sampler import BatchSampler, Order


def draws(batches: BatchSampler, count: int | None = None) -> list[tuple[int, int]]:
    return [draw for batch in islice(batches, count) for draw in batch]


def test_an_epoch_has_every_record_once_and_may_end_in_a_smaller_batch() -> None:
    batches = BatchSampler([5, 6], [None, None], 4, Order(0, epochs=1))
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert len(batches) == 3
    assert sorted(draws(batches)) == [(0, i) for i in range(5)] + [(1, i) for i in range(6)]


def test_epochs_have_different_orders_and_runs_the_same() -> None:
    batches = BatchSampler([50], [None], 50, Order(0, epochs=2))
    first, second = list(batches)
    assert first != second
    assert sorted(first) == sorted(second)
    assert [first, second] == list(batches)


def test_without_a_seed_the_order_is_that_of_the_file() -> None:
    assert draws(BatchSampler([4], [None], 2, Order(None, epochs=1))) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_weights_give_every_source_its_share() -> None:
    stream = draws(BatchSampler([3, 100], [3.0, 1.0], 8, Order(0)), 10)
    assert sum(source == 0 for source, _ in stream) == 60


def test_data_ranks_share_a_global_batch() -> None:
    whole = list(islice(BatchSampler([20], [None], 7, Order(3)), 3))
    shares = [list(islice(BatchSampler([20], [None], 7, Order(3), DataShare(r, 2)), 3)) for r in (0, 1)]
    for batch, one, other in zip(whole, *shares, strict=True):
        assert one == batch[0::2]
        assert other == batch[1::2]
