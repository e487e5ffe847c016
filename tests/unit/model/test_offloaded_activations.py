"""Activations that wait on the host: what is there, what comes back, and which memory is used again."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from automodel_rl.model import offloaded_activations
from automodel_rl.model.activation_checkpointing import checkpoint_layers
from automodel_rl.model.compiled_layers import compile_layers
from automodel_rl.model.offloaded_activations import ON_DEVICE, HostPages, OffloadedActivations

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_activations, "PAGE", 96)
    monkeypatch.setattr(offloaded_activations, "SLAB", 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 24, dtype=torch.float64), nn.Linear(24, 8, dtype=torch.float64)

    def forward(self, hidden: Tensor, factor: Tensor) -> Tensor:
        return hidden + self.narrow(torch.tanh(self.wide(hidden)) * factor)


def stack(num_layers: int = 6, *, offloads: bool, compiled: bool = False) -> tuple[nn.ModuleList, OffloadedActivations]:
    torch.manual_seed(0)
    layers, offloaded = nn.ModuleList(Layer() for _ in range(num_layers)), OffloadedActivations(CPU)
    checkpoint_layers(layers, "full")
    if compiled:
        compile_layers(layers)
    if offloads:
        offloaded.install(layers)
    return layers, offloaded


def run(layers: nn.ModuleList, num_tokens: int) -> tuple[Tensor, list[weakref.ref[Tensor]], Tensor]:
    """The last hidden states, all layers' inputs, and the first of them."""
    torch.manual_seed(num_tokens)
    first = hidden = torch.randn(1, num_tokens, 8, dtype=torch.float64).requires_grad_()
    factor, inputs = torch.rand(1, num_tokens, 1, dtype=torch.float64), []
    for layer in layers:
        inputs.append(weakref.ref(hidden))
        hidden = layer(hidden, factor)
    return hidden, inputs, first


def gradients(layers: nn.ModuleList, first: Tensor) -> Iterator[Tensor]:
    for tensor in (first, *layers.parameters()):
        assert tensor.grad is not None
        yield tensor.grad


def test_only_inputs_of_the_last_layers_are_on_the_device_after_a_forward() -> None:
    layers, _ = stack(offloads=True)
    _, inputs, first = run(layers, 7)
    assert [dead() is None for dead in inputs[1:]] == [True] * 5  # those of the last two are kept by other tensors
    assert first.grad is None
    kept = [each for each in gc.get_objects() if type(each) is offloaded_activations._Activation]
    assert sum(each.flat is not None for each in kept) == ON_DEVICE - 1
    assert len(kept) == 6


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_microbatches_in_flight_are_equal_to_the_bit_in_any_order(compiled: bool) -> None:
    plain, (offloading, _) = stack(offloads=False, compiled=compiled)[0], stack(offloads=True, compiled=compiled)
    found = []
    for layers in (plain, offloading):
        outputs = [run(layers, num_tokens) for num_tokens in (7, 3, 12)]
        for at in (1, 0, 2):
            outputs[at][0].square().sum().backward()
        found.append([grad for *_, first in outputs for grad in gradients(layers, first)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_pages_are_used_again_by_rows_of_other_lengths() -> None:
    layers, offloaded = stack(offloads=True)
    sizes = []
    for num_tokens in (12, 7, 12, 1, 11):
        run(layers, num_tokens)[0].sum().backward()
        sizes.append(offloaded.pages.num_bytes)
    assert len({*sizes}) == 1
    assert len(offloaded.pages._free) * offloaded_activations.PAGE == sizes[0]


def test_pages_of_a_forward_without_a_backward_come_back() -> None:
    layers, offloaded = stack(offloads=True)
    output = run(layers, 12)[0]
    del output
    assert len(offloaded.pages._free) * offloaded_activations.PAGE == offloaded.pages.num_bytes


def test_a_forward_without_gradients_keeps_nothing() -> None:
    layers, offloaded = stack(offloads=True)
    with torch.no_grad():
        run(layers, 12)
    assert offloaded.pages.num_bytes == 0


class Transposed(nn.Module):
    """A layer whose input is not in the order of its memory, and that keeps a part of a larger tensor."""

    def forward(self, hidden: Tensor) -> Tensor:
        turned = (hidden * 2).transpose(1, 2)
        return torch.sigmoid(turned * hidden.transpose(1, 2)).transpose(1, 2) * hidden[:, :, ::1]


def test_tensors_in_another_order_of_memory_come_back_as_they_were() -> None:
    wrapped, plain = Transposed(), Transposed()
    OffloadedActivations(CPU).install([wrapped])
    results = []
    for layer in (wrapped, plain):
        hidden = torch.arange(40.0).reshape(1, 8, 5).transpose(1, 2).requires_grad_()
        layer(hidden).sum().backward()
        results.append(hidden.grad)
    assert torch.equal(*results)


def test_pages_grow_by_slabs_and_hold_as_many_bytes_as_asked() -> None:
    pages = HostPages(CPU)
    taken = pages.take(offloaded_activations.PAGE * 5 + 1)
    assert len(taken) == 6
    assert pages.num_bytes == 8 * offloaded_activations.PAGE
    assert len({page.data_ptr() for page in taken}) == 6


def test_what_a_layer_shares_with_others_is_not_copied() -> None:
    """Here the factor, which has as many values as the input."""
    layer, offloaded = Layer(), OffloadedActivations(CPU)
    layer.forward = lambda hidden, factor: checkpoint(  # type: ignore[method-assign, assignment]
        lambda a, b: a * b, hidden, factor, use_reentrant=False
    )
    offloaded.install([layer])
    hidden = torch.randn(1, 12, 8, requires_grad=True)
    output = layer(hidden, torch.randn(1, 12, 8))
    kept = [each for each in gc.get_objects() if type(each) is offloaded_activations._Activation]
    assert [each.shape for each in kept] == [hidden.shape]
    del output
