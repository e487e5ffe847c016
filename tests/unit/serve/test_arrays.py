"""Arrays of messages, as the client makes them and as nobody should."""

from typing import Any

import numpy as np
import pytest
import torch
from tinker import types

from automodel_rl.errors import InputError
from automodel_rl.serve.arrays import SparsePositions, array_of
from automodel_rl.serve.checks import check_data
from automodel_rl.serve.messages import Datum
from automodel_rl.serve.wire import MESSAGES, read_data

MOST = 2**20


def places(row_ends: list[int], columns: list[int]) -> SparsePositions:
    return SparsePositions(np.array(row_ends, np.int64), np.array(columns, np.int64))


@pytest.mark.parametrize("unlisted", [0, -1])
def test_what_the_client_makes_sparse_is_the_array_again(unlisted: int) -> None:
    dense = torch.full((6, 9), unlisted)
    dense[0, 3], dense[2, 0], dense[2, 8], dense[5, 8] = 7, 4, 1, 2
    sent: Any = types.TensorData.from_torch_sparse(dense, unlisted)
    assert sent.sparse_crow_indices is not None
    found = array_of(
        np.array(sent.data), sent.shape, places(sent.sparse_crow_indices, sent.sparse_col_indices), unlisted, MOST, "it"
    )
    assert found.tolist() == dense.tolist()


@pytest.mark.parametrize(
    ("row_ends", "columns", "values", "shape"),
    [
        ([0, 1, 2], [0, 3], 2, [2, 3]),
        ([0, 1, 2], [0, -1], 2, [2, 3]),
        ([0, 2, 1], [0, 1], 2, [2, 3]),
        ([0, 3, 2], [0, 1], 2, [2, 3]),
        ([1, 1, 2], [0, 1], 2, [2, 3]),
        ([0, 1], [0], 1, [2, 3]),
        ([0, 1, 2], [0, 1], 1, [2, 3]),
        ([0, 1], [0], 1, [1]),
        ([0, 2**63 - 1, -2, 2], [0, 1], 2, [3, 3]),
        ([0, -(2**63), 2**63 - 1, 2], [0, 1], 2, [3, 3]),
    ],
)
def test_damaged_places_are_refused(row_ends: list[int], columns: list[int], values: int, shape: list[int]) -> None:
    with pytest.raises(InputError, match="do not fit the shape"):
        array_of(np.ones(values), shape, places(row_ends, columns), 0, MOST, "weights")


def test_a_place_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(InputError, match="weights is sparse and lists a position twice"):
        array_of(np.ones(2), [2, 3], places([0, 2, 2], [1, 1]), 0, MOST, "weights")


def test_a_small_message_does_not_become_a_huge_array() -> None:
    with pytest.raises(InputError, match="limited to limits.body_mib, including sparse ones"):
        array_of(np.ones(1), [1, 2**40], places([0, 1], [0]), 0, MOST, "weights")


def test_many_small_messages_do_not_become_huge_together() -> None:
    crow = np.zeros(101, np.int64).tobytes()
    empty = MESSAGES["Csr"](values=b"", row_ends=crow, columns=b"")
    array = MESSAGES["Array"](csr=empty, dtype=1, shape=[100, 1000])
    datum = MESSAGES["Datum"](
        chunks=[MESSAGES["Chunk"](text=MESSAGES["Text"](tokens=np.ones(100, np.int32).tobytes()))]
    )
    datum.inputs["weights"].CopyFrom(array)
    assert read_data([datum], 10, MOST)[0].inputs["weights"].shape == (100, 1000)
    with pytest.raises(InputError, match="limited to limits.body_mib, including sparse ones"):
        read_data([datum] * 3, 10, MOST)
    with pytest.raises(InputError, match="3 datums: a request has 1 to 2"):
        read_data([datum] * 3, 2, MOST)


def test_narrow_datums_beside_a_wide_one_are_counted_as_wide(service_config: Any) -> None:
    wide = Datum(np.ones(1, np.int64), {"target_tokens": np.ones((1, 900), np.int64), "weights": np.ones((1, 900))})
    narrow = Datum(np.ones(60, np.int64), {"target_tokens": np.ones(60, np.int64), "weights": np.ones(60)})
    with pytest.raises(InputError, match="tokens with up to 900 targets each are .* fit \\(limits.body_mib\\)"):
        check_data([wide, *[narrow] * 2000], "cross_entropy", service_config, 300)


@pytest.fixture(name="service_config")
def make_service_config() -> Any:
    from automodel_rl.config import LoraConfig, ModelConfig, ServeConfig

    return ServeConfig(output="x", model=ModelConfig(path="y", lora=LoraConfig(rank=4)), microbatch_tokens=64)
