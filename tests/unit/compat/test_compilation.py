"""Compilation for any size: what is in a graph, and how many there are."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from automodel_rl.compat.compilation import CACHE_VARIABLE, compile_for_any_size, compile_for_rows, compiled_so_far


def test_graphs_are_counted_after_the_compiler_was_reset_too() -> None:
    before = compiled_so_far()
    for _ in range(2):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        torch.compiler.reset()  # it forgets all who are told of compilations
        compiled_so_far()
    since = compiled_so_far() - before
    assert since.graphs == 2
    assert since.seconds > 0


def test_numbers_of_modules_are_constants_of_a_graph(monkeypatch: Any) -> None:
    class Norm(nn.Module):
        def __init__(self, eps: float):
            super().__init__()
            self.eps = eps

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.eps

    inputs: list[Any] = []

    def backend(graph: Any, examples: list[Any]) -> Any:
        inputs.extend(examples)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic, **_: compiled(function, dynamic=dynamic, backend=backend)
    )
    layers = [Norm(1e-5), Norm(1e-6)]
    for layer in layers:
        assert torch.equal(compile_for_any_size(layer.forward)(torch.full((3, 4), 2.0)), layer(torch.full((3, 4), 2.0)))
    assert [x.dtype for x in inputs if isinstance(x, torch.Tensor)] == [torch.float32] * 2
    assert not any(isinstance(x, (float, torch.SymFloat)) for x in inputs)


def test_rows_have_one_graph_for_all_temperatures() -> None:
    compiled = compile_for_rows(lambda x, temperature: x / temperature)
    found = []
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9):
        before = compiled_so_far()
        compiled(torch.ones(5, 8), temperature)
        found.append((compiled_so_far() - before).graphs)
    assert found == [1, 0, 0, 0, 0]


def test_what_is_compiled_is_kept_where_a_restart_of_the_machine_leaves_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != CACHE_VARIABLE}
    code = (
        "import torch; from automodel_rl.compat.compilation import compile_for_rows; "
        "compile_for_rows(lambda x: x.sin() * 2)(torch.ones(3, 8))"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "XDG_CACHE_HOME": str(tmp_path)},
        check=True,
        capture_output=True,
    )
    assert [*(tmp_path / "automodel_rl" / "inductor").rglob("*.py")]
