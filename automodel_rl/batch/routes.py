"""Routes: which experts a generator chose for every token, in the layers of a model that have a router.

Unlike everything else in a row, a route belongs to the token that is *computed*, not to the one that is predicted, so
nothing shifts it: entry t is about `input_ids[t]`.

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
"""In all K entries: no generator said where the token went."""


@dataclass(frozen=True)
class RouterShape:
    """What routes of a model look like.

    Attributes:
        num_layers: of the model, dense ones included.
        layers: numbers of those that have a router.
        num_experts: of a layer.
        top_k: experts of a token.

    Example:
        >>> RouterShape(num_layers=3, layers=(1, 2), num_experts=64, top_k=6).columns(payload_layers=3)
        [1, 2]
    """

    num_layers: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def columns(self, payload_layers: int) -> list[int]:
        """Where a generator's array has the layers with a router.

        Args:
            payload_layers: how many layers it has: all of the model, or only those with a router.

        Raises:
            ValueError: it has another number.
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
    """Experts of every token. `read_routes` makes them of what a generator says, and looks for damage.

    Attributes:
        layers: numbers in the model of the M layers.
        experts: ids, int16 [n, M, K]; `MISSING` where unknown, and the model then chooses by itself.

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
            ValueError: it is not among `layers`.
        """
        return self.experts[:, self._column(layer)]

    def select(self, layers: Sequence[int]) -> "Routes":
        """Those of some of the layers.

        Raises:
            ValueError: one is not among `layers`.
        """
        if tuple(layers) == self.layers:
            return self
        columns = torch.tensor([self._column(layer) for layer in layers], dtype=torch.int64)
        return Routes(tuple(layers), self.experts.index_select(1, columns))

    def take(self, places: Tensor, is_token: Tensor) -> "Routes":
        """Those of the tokens at `places` [t]; missing where `is_token` [t] is False."""
        experts = self.experts.index_select(0, places)  # indexing with brackets takes 25 times as long
        experts[~is_token] = MISSING
        return Routes(self.layers, experts)

    def _column(self, layer: int) -> int:
        if layer not in self.layers:
            raise ValueError(f"routes of layers {self.layers} cannot be followed in layer {layer}")
        return self.layers.index(layer)

    def num_missing(self) -> int:
        """How many of the n x M choices nobody knows, the last token's aside, which nothing depends on."""
        return int((self.experts[:-1, :, 0] == MISSING).sum())


def join_routes(pieces: Sequence[Routes | None]) -> Routes | None:
    """Routes of sequences back to back.

    Raises:
        ValueError: some sequences have routes and others do not.
    """
    known = [piece for piece in pieces if piece is not None]
    if not known:
        return None
    if len(known) < len(pieces):
        raise ValueError(
            f"{len(pieces) - len(known)} of {len(pieces)} sequences in a row have no routes: give all of them some "
            "(read_routes(None, ...) where a generator gave none), or none"
        )
    return Routes(known[0].layers, torch.cat([piece.experts for piece in known]))


def read_routes(payload: Any, num_prompt: int, num_completion: int, shape: RouterShape) -> Routes:
    """Routes of a prompt and its completion from what a generator returned with it.

    The last token was sampled and never computed, so its route is missing or, where the generator has a row for it,
    left out; it can have no effect on anything.

    Args:
        payload: integers [rows, layers, K], or a pair of the prompt's rows and the completion's. Rows for all tokens or
            for all but the last; layers: all of the model, those without a router holding anything, or only those
            with one. A row of -1 is missing. None, or a list of nothing but None, is "no routes".
        num_prompt, num_completion: their tokens.
        shape: of the model's routes.

    Returns:
        Routes [num_prompt + num_completion, M, K].

    Raises:
        ValueError: the payload cannot be this completion's: another shape, nothing but zeros, ids that no expert has,
            the same expert twice, or a token known in part; layer and row are named.

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
    """Raises ValueError at the first token and layer whose experts cannot be right."""
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
