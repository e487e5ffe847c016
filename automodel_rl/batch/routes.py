"""Routes: the experts that a generator chose for every token, in every layer that has a router.

Other per-token values of a microbatch stand at the position that predicts their token. A route stands at its own token:
entry t is the route of `input_ids[t]`.

Shape letters: n tokens, M layers with a router, K experts of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

MISSING = -1
"""Expert id that stands in all K entries of a token whose experts are unknown."""


@dataclass(frozen=True)
class RouterShape:
    """The shape of a model's routes.

    Attributes:
        num_layers: number of layers of the model, dense ones included.
        layers: numbers of the layers that have a router.
        num_experts: number of experts of a layer.
        top_k: number of experts that each token goes to.

    Example:
        >>> RouterShape(num_layers=3, layers=(1, 2), num_experts=64, top_k=6).columns(payload_layers=3)
        [1, 2]
    """

    num_layers: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def columns(self, payload_layers: int) -> list[int]:
        """Places of the layers with a router in a generator's array.

        Args:
            payload_layers: number of layers in the array: all layers of the model, or only those with a router.

        Raises:
            ValueError: the array has another number of layers.
        """
        if payload_layers == self.num_layers:
            return list(self.layers)
        if payload_layers == len(self.layers):
            return list(range(len(self.layers)))
        raise ValueError(
            f"routes are of {payload_layers} layers, and the model has {self.num_layers}, {len(self.layers)} of them "
            "with a router"
        )


@dataclass(frozen=True)
class Routes:
    """The experts of every token. `read_routes` makes and checks them from what a generator returned.

    Attributes:
        layers: the numbers of the M layers in the model.
        experts: ids of experts, int16 [n, M, K]; `MISSING` where they are unknown, and there the router chooses.

    Example:
        >>> import torch
        >>> Routes((1, 2), torch.zeros(5, 2, 6, dtype=torch.int16)).of(2).shape
        torch.Size([5, 6])
    """

    layers: tuple[int, ...]
    experts: Tensor

    def __len__(self) -> int:
        return len(self.experts)

    def of(self, layer: int) -> Tensor:
        """The experts [n, K] of one layer.

        Raises:
            ValueError: the layer is not among `layers`.
        """
        return self.experts[:, self._column(layer)]

    def select(self, layers: Sequence[int]) -> "Routes":
        """The routes of some of the layers.

        Raises:
            ValueError: a layer is not among `layers`.
        """
        if tuple(layers) == self.layers:
            return self
        columns = torch.tensor([self._column(layer) for layer in layers], dtype=torch.int64)
        return Routes(tuple(layers), self.experts.index_select(1, columns))

    def take(self, places: Tensor, is_token: Tensor) -> "Routes":
        """The routes of the tokens at `places` [t]; `MISSING` where `is_token` [t] is False."""
        experts = self.experts.index_select(0, places)  # indexing with brackets takes 25 times as long
        experts[~is_token] = MISSING
        return Routes(self.layers, experts)

    def _column(self, layer: int) -> int:
        if layer not in self.layers:
            raise ValueError(f"routes of layers {self.layers} cannot be followed in layer {layer}")
        return self.layers.index(layer)

    def missing(self) -> np.ndarray:
        """The number of unknown choices of each token, int16 [n], of M each. The last token's are not counted: nothing
        depends on them."""
        counts = (self.experts[:, :, 0] == MISSING).sum(1).to(torch.int16)
        counts[-1:] = 0
        return counts.numpy()

    def num_missing(self) -> int:
        """Number of unknown choices, of n x M, without the last token's."""
        return int(self.missing().sum())


def join_routes(pieces: Sequence[Routes | None]) -> Routes | None:
    """The routes of a microbatch, joined from the routes of its sequences.

    Raises:
        ValueError: some sequences have routes and others do not.
    """
    known = [piece for piece in pieces if piece is not None]
    if not known:
        return None
    if len(known) < len(pieces):
        raise ValueError(
            f"{len(pieces) - len(known)} of {len(pieces)} sequences in a microbatch have no routes: give all of them "
            "some (read_routes(None, ...) where a generator gave none), or none"
        )
    return Routes(known[0].layers, torch.cat([piece.experts for piece in known]))


def read_routes(payload: Any, num_prompt: int, num_completion: int, shape: RouterShape) -> Routes:
    """Routes of a prompt and its completion, read from what a generator returned and checked.

    The last token was sampled and never computed, so it has no route that matters. It becomes `MISSING`, even if the
    generator returned a row for it.

    Args:
        payload: integers [rows, layers, K], or a pair of such arrays, for the prompt and for the completion. Rows: one
            for every token, or for every token but the last. Layers: all layers of the model, with any values in
            those without a router, or only those with a router. A token's K entries are -1 if its experts are
            unknown. None, or a list of nothing but None, means that there are no routes.
        num_prompt, num_completion: number of tokens of the prompt and of the completion.
        shape: the shape of the model's routes.

    Returns:
        Routes with experts [num_prompt + num_completion, M, K].

    Raises:
        ValueError: the payload cannot belong to this completion. It has another shape or only zeros, or a token has ids
            that no expert has, the same expert twice, or only some known experts. The message names layer and row.

    Example:
        >>> import numpy as np
        >>> shape = RouterShape(num_layers=2, layers=(1,), num_experts=4, top_k=2)
        >>> dense_first = np.array([[[0, 0], [3, 1]], [[0, 0], [2, 0]]])
        >>> routes = read_routes(dense_first, num_prompt=2, num_completion=1, shape=shape)
        >>> routes.layers, routes.experts.tolist()
        ((1,), [[[3, 1]], [[2, 0]], [[-1, -1]]])
    """
    num_tokens = num_prompt + num_completion
    experts = np.full((num_tokens, len(shape.layers), shape.top_k), MISSING, dtype=np.int16)
    rows = _joined(payload, num_prompt)
    if rows is not None:
        if rows.ndim != 3 or rows.dtype.kind not in "iu":
            raise ValueError(f"routes are {rows.dtype} {list(rows.shape)}, and should be integers [rows, layers, K]")
        if len(rows) not in (num_tokens - 1, num_tokens):
            raise ValueError(
                f"routes have {len(rows)} rows for {num_prompt} + {num_completion} tokens: one each, or one less, for "
                "the last token is never computed"
            )
        if rows.shape[2] != shape.top_k:
            raise ValueError(f"routes name {rows.shape[2]} experts of a token, and the model takes {shape.top_k}")
        chosen = rows[: num_tokens - 1, shape.columns(rows.shape[1])]
        _check(chosen, shape)
        experts[: num_tokens - 1] = chosen
    return Routes(shape.layers, torch.from_numpy(experts))


def _joined(payload: Any, num_prompt: int) -> np.ndarray | None:
    if isinstance(payload, tuple) and len(payload) == 2:
        prompt, completion = (_array(part) for part in payload)
        if prompt is None and completion is None:
            return None
        if prompt is None or completion is None:
            raise ValueError(f"routes of the {'prompt' if prompt is None else 'completion'} are missing")
        if len(prompt) != num_prompt:
            raise ValueError(f"the prompt's routes have {len(prompt)} rows for its {num_prompt} tokens")
        return np.concatenate([prompt, completion])
    return _array(payload)


def _array(part: Any) -> np.ndarray | None:
    if part is None or (isinstance(part, list) and all(entry is None for entry in part)):
        return None
    return np.asarray(part)


def _check(chosen: np.ndarray, shape: RouterShape) -> None:
    """Raises ValueError for the first token and layer whose experts cannot be right."""
    if len(chosen) > 1 and not chosen.any():
        raise ValueError(
            "routes are all zero: the generator did not note its choices (not all of vLLM's kernels for experts do; "
            "its option moe_backend=triton chooses one that does)"
        )
    planes = np.ascontiguousarray(chosen.transpose(2, 0, 1))  # comparing strided ones takes four times as long
    missing = planes == MISSING
    partly = missing.any(0) & ~missing.all(0)
    unknown = ((planes < MISSING) | (planes >= shape.num_experts)).any(0)
    twice = np.zeros_like(partly)
    for i, j in combinations(range(shape.top_k), 2):  # a sort of every row takes ten times as long
        twice |= (planes[i] == planes[j]) & ~missing[i]
    for wrong, rule in (
        (unknown, f"ids are 0 to {shape.num_experts - 1}"),
        (partly, "a token's experts are all known or all missing"),
        (twice, "a token's experts differ"),
    ):
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"routes of layer {shape.layers[column]}, row {row}: experts {chosen[row, column].tolist()}; {rule}"
            )
