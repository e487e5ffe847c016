"""The order in which a part is laid out, and what is around a layer's forward after it."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from automodel_rl.batch.local_microbatch import LocalMicrobatch, local_microbatch
from automodel_rl.batch.microbatch import TokenSequence, pack_microbatch
from automodel_rl.batch.microbatch_scope import MicrobatchScope
from automodel_rl.config.model import MemoryConfig
from automodel_rl.model.parallelise import STEPS, compile_and_recompute


def test_weights_are_cut_before_forwards_are_set_and_forwards_wrapped_before_fsdp() -> None:
    assert [step.__name__ for step in STEPS] == [
        "choose_dtypes",
        "split_experts",
        "split_weights",
        "replace_token_mixers",
        "replace_indexers",
        "replace_layer_forwards",
        "quantize_base",
        "add_float8_and_adapters",
        "compute_mlps_in_tiles",
        "replace_part_forward",
        "fuse_norms",
        "watch_routers",
        "compile_and_recompute",
        "shard",
    ]


class Layer(nn.Module):
    """Notes which microbatch its scope shows."""

    def __init__(self, scope: MicrobatchScope):
        super().__init__()
        self.linear, self.scope = nn.Linear(2, 2), scope
        self.seen: list[LocalMicrobatch | None] = []

    def forward(self, hidden: Tensor, *, microbatch: LocalMicrobatch) -> Tensor:
        self.seen.append(self.scope.microbatch)
        return self.linear(hidden).relu()


class Compiled:
    """Stands for a compiled forward."""

    def __init__(self, inner: Callable[..., Any]):
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def around(forward: Any) -> list[str]:
    """The names of what is around a layer's own forward, from the outside."""
    if isinstance(forward, functools.partial):
        return [forward.func.__name__, *around(forward.args[0])]
    forward = getattr(forward, "__wrapped__", forward)  # `_with_gradient`
    inner = vars(forward).get("inner")
    return [] if inner is None else [type(forward).__name__, *around(inner)]


def laid_out(*, compiled: bool, mixture: bool, lora: bool, recomputed: str) -> tuple[Layer, MicrobatchScope]:
    scope = MicrobatchScope(tracks_first=mixture)
    layer = Layer(scope)
    work: Any = SimpleNamespace(
        layers={0: layer},
        counts=mixture,
        model=SimpleNamespace(lora=object() if lora else None),
        memory=MemoryConfig.model_validate({"activation_checkpointing": recomputed}),
        compiled=compiled,
        scope=scope,
    )
    with mock.patch("automodel_rl.model.compiled_layers.compile_for_any_size", Compiled):
        compile_and_recompute(work)
    return layer, scope


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"compiled": True, "mixture": False, "lora": False}, ["Compiled", "checkpoint"]),
        (
            {"compiled": True, "mixture": False, "lora": True},
            ["_Followed", "Compiled", "checkpoint", "_Followed"],
        ),
        ({"compiled": True, "mixture": True, "lora": True}, ["checkpoint", "_Followed", "Compiled"]),
        ({"compiled": False, "mixture": True, "lora": False}, ["checkpoint", "_Followed"]),
        ({"compiled": False, "mixture": False, "lora": True}, ["checkpoint", "_Followed"]),
        ({"compiled": False, "mixture": False, "lora": False}, ["checkpoint"]),
    ],
    ids=str,
)
def test_what_is_around_a_layer(settings: dict[str, bool], expected: list[str]) -> None:
    layer, _ = laid_out(**settings, recomputed="full")
    assert around(layer.forward) == expected


@pytest.mark.parametrize("kind", ["mixture", "lora"])
def test_a_recomputation_sees_its_own_microbatch(kind: str) -> None:
    """Also after the forward of a later one, as in a pipeline."""
    layer, _ = laid_out(compiled=False, mixture=kind == "mixture", lora=kind == "lora", recomputed="full")
    first, second = (
        local_microbatch(pack_microbatch([TokenSequence(torch.arange(n), torch.ones(n, dtype=torch.bool))]))
        for n in (3, 5)
    )
    outputs = [layer(torch.randn(1, 2, requires_grad=True), microbatch=each) for each in (first, second)]
    for output in outputs:
        output.sum().backward()
    assert [seen is each for seen, each in zip(layer.seen, (first, second, first, second), strict=True)] == [True] * 4
