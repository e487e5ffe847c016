"""Routes from what engines return: layers by number, rows, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from automodel_rl.batch import RouterShape, Routes, TokenSequence, local_microbatch, pack, pack_microbatch, read_routes
from automodel_rl.batch.routes import MISSING

SHAPE = RouterShape(num_layers=27, layers=tuple(range(1, 27)), num_experts=64, top_k=6)
PROMPT, COMPLETION = 3, 4
TOKENS = PROMPT + COMPLETION


def payload(rows: int = TOKENS - 1, layers: int = 27, dtype: type = np.uint8) -> np.ndarray:
    """Distinct experts for every token, other ones in every layer."""
    first = np.arange(rows)[:, None, None] * 5 + np.arange(layers)[None, :, None] * 3
    return ((first + np.arange(6) * 7) % 64).astype(dtype)


@pytest.mark.parametrize(("layers", "columns"), [(27, (1, 12, 13, 26)), (26, (0, 11, 12, 25))])
def test_layers_map_by_number_in_both_layouts(layers: int, columns: tuple[int, ...]) -> None:
    array = payload(layers=layers)
    if layers == 27:
        array[:, 0] = 0  # an engine leaves the dense layer at zero
    routes = read_routes(array, PROMPT, COMPLETION, SHAPE)
    assert SHAPE.columns(layers) == list(range(27 - 26 if layers == 27 else 0, layers))
    for layer, column in zip((1, 12, 13, 26), columns, strict=True):
        assert SHAPE.columns(layers)[SHAPE.layers.index(layer)] == column
        assert torch.equal(routes.of(layer)[:-1], torch.from_numpy(array[:, column].astype(np.int16)))
    for stages in ([range(13), range(13, 27)], [range(7), range(7, 13), range(13, 21), range(21, 27)]):
        for stage in stages:
            own = [layer for layer in stage if layer in SHAPE.layers]
            part = routes.select(own)
            assert part.layers == tuple(own)
            assert all(torch.equal(part.of(layer), routes.of(layer)) for layer in own)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("form", ["all but the last", "all", "prompt and completion", "lists"])
def test_rows_may_be_of_all_tokens_or_all_but_the_last_joined_or_not(form: str, dtype: type) -> None:
    array = payload(TOKENS, dtype=dtype)
    given: Any = {
        "all but the last": array[:-1],
        "all": array,
        "prompt and completion": (array[:PROMPT], array[PROMPT:-1]),
        "lists": array[:-1].tolist(),
    }[form]
    routes = read_routes(given, PROMPT, COMPLETION, SHAPE)
    assert routes.experts.dtype == torch.int16
    assert torch.equal(routes.experts[:-1], torch.from_numpy(array[:-1, 1:].astype(np.int16)))
    assert (routes.experts[-1] == MISSING).all()
    assert routes.num_missing() == 0


@pytest.mark.parametrize("nothing", [None, [], [None, None], (None, None), ([None], None)], ids=str)
def test_nones_are_no_routes(nothing: Any) -> None:
    routes = read_routes(nothing, PROMPT, COMPLETION, SHAPE)
    assert (routes.experts == MISSING).all()
    assert routes.num_missing() == (TOKENS - 1) * 26


def test_rows_of_minus_one_are_missing() -> None:
    array = payload(dtype=np.int16)
    array[2, 5] = array[4, 6] = MISSING
    assert read_routes(array, PROMPT, COMPLETION, SHAPE).num_missing() == 2


def damaged(row: int, layer: int, expert: int, value: int) -> np.ndarray:
    array = payload(dtype=np.int32)
    array[row, layer, expert] = value
    return array


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (payload(layers=25), "routes are for 25 layers, but the model has 27, 26 of them with a router"),
        (payload(layers=28), "routes are for 28 layers"),
        (payload(TOKENS - 2), r"routes have 5 rows for 3 \+ 4 tokens"),
        (payload(TOKENS + 1), r"routes have 8 rows for 3 \+ 4 tokens"),
        (payload()[..., :5], "routes name 5 experts per token, but the model uses 6"),
        (payload().astype(np.float32), "routes are float32"),
        (payload()[0], r"routes are uint8 \[27, 6\]"),
        ((payload(2), payload(4)), "the prompt's routes have 2 rows for its 3 tokens"),
        ((payload(3), None), "routes of the completion are missing"),
        (np.zeros_like(payload()), "routes are all zero: the generator did not record its choices"),
        (damaged(4, 13, 2, 64), "routes of layer 13, row 4: experts .* ids must be 0 to 63"),
        (damaged(0, 1, 0, -2), "routes of layer 1, row 0: experts .* ids must be 0 to 63"),
        (damaged(5, 26, 3, MISSING), "routes of layer 26, row 5: experts .* all known or all missing"),
        (damaged(2, 7, 1, int(payload()[2, 7, 4])), "routes of layer 7, row 2: experts .* experts must differ"),
    ],
)
def test_damaged_routes_are_refused_with_layer_and_row(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_routes(given, PROMPT, COMPLETION, SHAPE)


def test_experts_beyond_a_byte_are_read() -> None:
    shape = dataclasses.replace(SHAPE, num_experts=512)
    array = payload(dtype=np.uint16) + np.uint16(400)
    assert int(read_routes(array, PROMPT, COMPLETION, shape).experts.max()) > 400
    with pytest.raises(ValueError, match="ids must be 0 to 255"):
        read_routes(array, PROMPT, COMPLETION, dataclasses.replace(SHAPE, num_experts=256))


def sequence(length: int, start: int) -> TokenSequence:
    """Its routes name the token they belong to, in every layer."""
    ids = torch.arange(start, start + length)
    experts = ids[:, None, None].expand(length, 2, 1).short()
    return TokenSequence(ids, torch.ones(length, dtype=torch.bool), routes=Routes((1, 3), experts))


@pytest.mark.parametrize(("cp", "multiple"), [(1, 1), (1, 8), (2, 4), (4, 1)])
def test_routes_stay_with_their_tokens_in_bins_and_over_cp(cp: int, multiple: int) -> None:
    for row in pack([sequence(5, 1), sequence(9, 20), sequence(2, 40)], capacity=14):
        assert row.routes is not None
        assert torch.equal(row.routes.of(3)[:, 0].long(), row.input_ids)
        for rank in range(cp):
            local = local_microbatch(row, cp, rank, multiple)
            assert local.routes is not None
            expected = torch.where(local.is_real, local.input_ids, MISSING)
            assert torch.equal(local.routes.of(1)[:, 0].long(), expected)


def test_a_row_takes_routes_of_all_its_sequences_or_of_none() -> None:
    bare = dataclasses.replace(sequence(3, 9), routes=None)
    assert pack_microbatch([bare, bare]).routes is None
    with pytest.raises(ValueError, match="1 of 2 sequences in a microbatch have no routes"):
        pack_microbatch([sequence(3, 9), bare])


def test_a_route_is_needed_for_every_token() -> None:
    with pytest.raises(ValueError, match="routes have 3 rows for 4 tokens"):
        TokenSequence(torch.arange(4), torch.ones(4, dtype=torch.bool), routes=sequence(3, 0).routes)
