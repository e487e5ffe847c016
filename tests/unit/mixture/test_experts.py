"""Products of experts' adapters in bfloat16, of any rank."""

from types import SimpleNamespace

import pytest
import torch

from automodel_rl.mixture.experts import _through_adapter
from automodel_rl.quantized import stack


@pytest.mark.parametrize("rank", [1, 3, 8, 12])
def test_adapters_of_any_rank_are_grouped_products(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    torch.manual_seed(0)
    counts, inputs = torch.tensor([3, 0, 5]), torch.randn(8, 16)
    sizes = {"lora_A": (3, rank, 16), "lora_B": (3, 24, rank)}
    wide = {name: torch.randn(size).bfloat16().float().requires_grad_() for name, size in sizes.items()}
    narrow = {name: tensor.detach().bfloat16().requires_grad_() for name, tensor in wide.items()}
    calls, grouped = [], stack.F.grouped_mm
    monkeypatch.setattr(stack.F, "grouped_mm", lambda *of, **how: calls.append(of) or grouped(*of, **how))
    results = []
    for tensors in (narrow, wide):
        adapter = SimpleNamespace(**{name: SimpleNamespace(weight=tensor) for name, tensor in tensors.items()})
        output = _through_adapter(adapter, inputs.to(tensors["lora_A"].dtype), counts)
        output.float().square().sum().backward()
        results.append([output, *(tensor.grad for tensor in tensors.values())])
    assert len(calls) == 2
    for found, right in zip(*results, strict=True):
        assert found.shape == right.shape
        torch.testing.assert_close(found.float(), right, rtol=0.03, atol=0.03 * right.abs().max().item())
