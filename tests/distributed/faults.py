"""Known bugs that tests put into the package, to see that they are noticed."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from automodel_rl.batch import LocalRow, PackedBatch, local_row


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Puts a known bug into the package for the length of a comparison."""
    with contextlib.nullcontext() if fault is None else FAULTS[fault]():
        yield


def one_document(row: PackedBatch, *place: int) -> LocalRow:
    """A row without its cu_seqlens: the documents see each other."""
    return local_row(dataclasses.replace(row, lengths=(row.num_tokens,)), *place)


def _patch(target: str, replacement: Any = None, **options: Any) -> Any:
    options = options or {"new": replacement}
    return mock.patch(f"automodel_rl.{target}", **options)


def _norm_of_last_stage() -> Any:
    from automodel_rl.parallel.gradients import local_square_norm

    def norm(parameters: list, layout: Any) -> Tensor:
        return local_square_norm(parameters, layout) * layout.has_last_stage

    return _patch("engine.engine.local_square_norm", norm)


def _local_counts() -> Any:
    from automodel_rl.losses import count
    from automodel_rl.parallel.agreement import GlobalRows, agree_on_rows

    def agree(batches: list, *rest: Any) -> GlobalRows:
        return dataclasses.replace(agree_on_rows(batches, *rest), counts=count(batches))

    return _patch("model.handle.agree_on_rows", agree)


def _experts_twice() -> Any:
    from automodel_rl.parallel.sharding import sum_fsdp_gradients

    def twice(part: Any) -> None:
        sum_fsdp_gradients(part)
        for name, module in part.named_modules():
            if name.endswith(".experts") and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(0.5)

    return _patch("parallel.sharding.sum_fsdp_gradients", twice)


def _swap_of_one_part() -> Any:
    from automodel_rl.engine.reference_weights import ReferenceWeights

    class OnePart(ReferenceWeights):
        def __init__(self, handle: Any):
            first = copy.copy(handle)
            first.parts = handle.parts[:1]
            super().__init__(first)

    return _patch("tools.verify.comparison.ReferenceWeights", OnePart)


def _routes_shifted() -> Any:
    """As if they belonged to the token that is predicted."""
    from automodel_rl.batch import Routes

    take = Routes.take

    def shifted(routes: Routes, places: Tensor, is_token: Tensor) -> Routes:
        return take(dataclasses.replace(routes, experts=routes.experts.roll(-1, 0)), places, is_token)

    return mock.patch.object(Routes, "take", shifted)


def _routes_by_place() -> Any:
    """As if a stage's layers were numbered from 0."""
    from automodel_rl.batch import Routes

    def select(routes: Routes, layers: Any) -> Routes:
        return Routes(tuple(layers), routes.experts[:, : len(layers)])

    return mock.patch.object(Routes, "select", select)


def _mean_over_two(where: str) -> Any:
    """FSDP's own average, in one module."""
    from automodel_rl.parallel.sharding import wrap_fsdp

    def averaging(part: Any, *args: Any) -> None:
        wrap_fsdp(part, *args)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)

    return _patch(f"{where}.wrap_fsdp", averaging)


def _clip_by_module() -> Any:
    """Each mesh's gradients by their own norm."""

    def clip(parameters: list, most: float, _: Tensor) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, most)

    return mock.patch("torch.nn.utils.clip_grads_with_norm_", clip)


def _embeddings_a_row_off() -> Any:
    from automodel_rl.batch import ImageTokens

    put_into = ImageTokens.put_into

    def off(tokens: ImageTokens, hidden: Tensor) -> Tensor:
        assert tokens.embeddings is not None
        return put_into(dataclasses.replace(tokens, embeddings=tokens.embeddings.roll(1, 0)), hidden)

    return mock.patch.object(ImageTokens, "put_into", off)


FAULTS = {
    "documents see each other": lambda: _patch("model.local_rows.local_row", one_document),
    "tied gradient counted once": lambda: _patch("parallel.gradients.TiedEmbedding.sum_gradients", return_value=None),
    "mean over data ranks": lambda: _patch("parallel.sharding.sum_fsdp_gradients", return_value=None),
    "mean over cp": lambda: _patch("parallel.sharding.sum_fsdp_gradients", return_value=None),
    "local token counts": _local_counts,
    "rotary embeddings by the longest sequence": lambda: _patch("parallel.combinations.BY_LENGTH", ()),
    "norm of one stage": _norm_of_last_stage,
    "expert gradients scaled twice": _experts_twice,
    "reference swap of one part": _swap_of_one_part,
    "partial gradients of tp left alone": lambda: _patch("model.handle.sum_partial_gradients", return_value=None),
    "routes shifted by a token": _routes_shifted,
    "routes of other layers": _routes_by_place,
    "mean over encoder ranks": lambda: _mean_over_two("model.vision"),
    "mean over ranks of the language model": lambda: _mean_over_two("model.parallelise"),
    "clipping by module": _clip_by_module,
    "embeddings a row off": _embeddings_a_row_off,
}
