"""Routes: the experts that a generator chose for each token in every layer with a router.

Other per-token values of a microbatch are aligned with predicting positions. Routes are aligned with their own tokens:
entry t is the route of `input_ids[t]`.

Shape letters: n tokens, M layers with a router, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

MISSING = -1
"""Expert id in all K entries of a token whose experts are unknown."""


@dataclass(frozen=True)
class RouterShape:
    """The shape of a model's routes.

    Attributes:
        num_layers: number of layers, including dense ones.
        layers: indices of the layers with a router.
        num_experts: number of experts per layer.
        top_k: number of experts per token.

    Example:
        >>> RouterShape(num_layers=3, layers=(1, 2), num_experts=64, top_k=6).columns(payload_layers=3)
        [1, 2]
    """

    num_layers: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def columns(self, payload_layers: int) -> list[int]:
        """Returns the indices of the router layers in a generator's array of `payload_layers` layers, which are either
        all layers of the model or only those with a router.

        Raises:
            ValueError: the array has another number of layers.
        """
        if payload_layers == self.num_layers:
            return list(self.layers)
        if payload_layers == len(self.layers):
            return list(range(len(self.layers)))
        raise ValueError(
            f"routes are for {payload_layers} layers, but the model has {self.num_layers}, {len(self.layers)} of them "
            "with a router"
        )


@dataclass(frozen=True)
class Routes:
    """The experts of every token. `read_routes` creates and validates them from a generator's output.

    Attributes:
        layers: model indices of the M layers.
        experts: expert ids, int16 [n, M, K]; `MISSING` where unknown, which lets the router choose.

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
        """Returns the experts [n, K] of one `layer`, which must be in `layers`."""
        return self.experts[:, self._column(layer)]

    def select(self, layers: Sequence[int]) -> "Routes":
        """Returns the routes of a subset of the `layers`."""
        if tuple(layers) == self.layers:
            return self
        columns = torch.tensor([self._column(layer) for layer in layers], dtype=torch.int64)
        return Routes(tuple(layers), self.experts.index_select(1, columns))

    def take(self, places: Tensor, is_token: Tensor) -> "Routes":
        """Returns the routes of the tokens at `places` [t]; `MISSING` where `is_token` [t] is False."""
        experts = self.experts.index_select(0, places)  # 25 times faster than indexing
        experts[~is_token] = MISSING
        return Routes(self.layers, experts)

    def _column(self, layer: int) -> int:
        if layer not in self.layers:
            raise ValueError(f"routes of layers {self.layers} cannot be followed in layer {layer}")
        return self.layers.index(layer)

    def missing(self) -> np.ndarray:
        """Returns the number of unknown choices per token, int16 [n], at most M. The last token counts as 0, since
        nothing depends on its route."""
        counts = (self.experts[:, :, 0] == MISSING).sum(1).to(torch.int16)
        counts[-1:] = 0
        return counts.numpy()

    def num_missing(self) -> int:
        """Returns the total number of unknown choices, without the last token's."""
        return int(self.missing().sum())


def join_routes(pieces: Sequence[Routes | None]) -> Routes | None:
    """Concatenates the routes of a microbatch's sequences; None if none has any. Raises ValueError if only some have
    routes."""
    known = [piece for piece in pieces if piece is not None]
    if not known:
        return None
    if len(known) < len(pieces):
        raise ValueError(
            f"{len(pieces) - len(known)} of {len(pieces)} sequences in a microbatch have no routes: pass routes for "
            "all of them (read_routes(None, ...) where a generator returned none), or for none"
        )
    return Routes(known[0].layers, torch.cat([piece.experts for piece in known]))


def read_routes(payload: Any, num_prompt: int, num_completion: int, shape: RouterShape) -> Routes:
    """Validates a generator's routes of a prompt with its completion.

    The last token was sampled but never computed, so it has no route. It becomes `MISSING` even if the generator
    returned a row for it.

    Args:
        payload: integers [rows, layers, K], or a pair of such arrays for prompt and completion. Rows: one per token, or
            per token but the last. Layers: all layers of the model, with arbitrary values for those without a router,
            or only those with a router. A token with unknown experts has -1 in all K entries. None, or a list of None,
            means that there are no routes.
        num_prompt, num_completion: number of tokens of the prompt and of the completion.
        shape: the shape of the model's routes.

    Returns:
        Routes with experts [num_prompt + num_completion, M, K].

    Raises:
        ValueError: the payload has a wrong shape or only zeros, or a token has invalid, duplicate or partially missing
            experts. The message names layer and row.

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
            raise ValueError(f"routes are {rows.dtype} {list(rows.shape)}, but should be integers [rows, layers, K]")
        if len(rows) not in (num_tokens - 1, num_tokens):
            raise ValueError(
                f"routes have {len(rows)} rows for {num_prompt} + {num_completion} tokens: expected one each, or one "
                "less, because the last token is never computed"
            )
        if rows.shape[2] != shape.top_k:
            raise ValueError(f"routes name {rows.shape[2]} experts per token, but the model uses {shape.top_k}")
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
    """Raises ValueError for the first token and layer with invalid experts."""
    if len(chosen) > 1 and not chosen.any():
        raise ValueError(
            "routes are all zero: the generator did not record its choices (not all of vLLM's expert kernels do; its "
            "option moe_backend=triton selects one that does)"
        )
    planes = np.ascontiguousarray(chosen.transpose(2, 0, 1))  # four times faster to compare than strided arrays
    missing = planes == MISSING
    partly = missing.any(0) & ~missing.all(0)
    unknown = ((planes < MISSING) | (planes >= shape.num_experts)).any(0)
    twice = np.zeros_like(partly)
    for i, j in combinations(range(shape.top_k), 2):  # ten times faster than sorting every row
        twice |= (planes[i] == planes[j]) & ~missing[i]
    for wrong, rule in (
        (unknown, f"ids must be 0 to {shape.num_experts - 1}"),
        (partly, "a token's experts must be all known or all missing"),
        (twice, "a token's experts must differ"),
    ):
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            raise ValueError(
                f"routes of layer {shape.layers[column]}, row {row}: experts {chosen[row, column].tolist()}; {rule}"
            )
