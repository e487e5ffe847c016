"""Activations on the host: what layers keep for the backward waits in host memory, but for that of the last few layers.

Copies run on streams of their own, beside the layers' work: to the host while the next layer computes, and back one
layer ahead of the backward. A copy is exact.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from automodel_rl.compat.operations import tensors_in
from automodel_rl.model.offload import host_memory

PAGE = 1 << 22
"""Bytes of a page of host memory."""

SLAB = 64
"""Pages that are allocated, and pinned, at a time."""

ON_DEVICE = 3
"""Layers at most whose activations are on the device at one time: of two in the forward, whose copies may be under way,
and in the backward of one that is brought back ahead."""


class OffloadedActivations:
    """Keeps on the host what layers keep for the backward: with full recomputation each layer's input and, of compiled
    dense layers, the result of attention.

    Args:
        device: the device on which layers compute. A CPU's "host" is its own memory: there is nothing to save.
    """

    def __init__(self, device: torch.device):
        self.pages = HostPages(device)
        self._device = device
        self._outward, self._inward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._leaving: deque[weakref.ref[_Activation]] = deque()
        self._last: _LayerCall | None = None

    def install(self, layers: Iterable[Any]) -> None:
        """Wraps the forwards of a part's layers, in the order of their calls; hidden states [1, t, H] come first."""
        for position, layer in enumerate(layers):
            layer.forward = self._wrap(layer, layer.forward, is_first=position == 0)

    def _wrap(self, layer: nn.Module, forward: Callable[..., Any], is_first: bool) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(hidden, *args, **kwargs)
            self._last = this = _LayerCall(None if is_first else self._last)
            lasting = {tensor.untyped_storage().data_ptr() for tensor in _lasting(layer, args, kwargs)}
            keep = functools.partial(self._keep, this, lasting, hidden.numel() // 2)
            with saved_tensors_hooks(keep, self._bring_back):
                return forward(hidden, *args, **kwargs)

        return call

    def _keep(self, call: "_LayerCall", lasting: set[int], least: int, tensor: Tensor) -> "Tensor | _Activation":
        """Starts the copy to the host of a tensor of at least so many values, unless it belongs to others, too."""
        is_small = tensor.numel() < max(least, 1) or not tensor.is_floating_point()
        if is_small or tensor.untyped_storage().data_ptr() in lasting or isinstance(tensor, nn.Parameter):
            return tensor
        kept = _Activation(tensor.detach(), call)
        self._free_all_but(call)
        kept.pages = self.pages.take(kept.num_bytes)
        weakref.finalize(kept, self.pages.give_back, kept.pages).atexit = False
        kept.left = self._copy(self._outward, zip(kept.pages, kept.pieces(), strict=True))
        self._leaving.append(weakref.ref(kept))
        call.kept.append(weakref.ref(kept))
        return kept

    def _free_all_but(self, call: "_LayerCall") -> None:
        """Frees the device's memory of activations that are on the host, but those of a call and of the one before."""
        while self._leaving:
            kept = self._leaving[0]()
            if kept is not None and kept.call in (call, call.before):
                return
            self._leaving.popleft()
            if kept is not None:
                self._wait_for(kept.left)  # what takes the memory next is queued after this
                kept.flat = None

    def _bring_back(self, kept: "Tensor | _Activation") -> Tensor:
        """The tensor on the device; and starts to bring back those of the layer before."""
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        self._wait_for(kept.arrived)
        kept.arrived = None
        for other in kept.call.before.kept if kept.call.before is not None else ():
            if (ahead := other()) is not None:
                self._fetch(ahead)
        assert kept.flat is not None
        return kept.flat.as_strided(kept.shape, kept.strides)

    def _fetch(self, kept: "_Activation") -> None:
        """Starts the copy to the device, if it is not there or on its way."""
        if kept.flat is None:
            kept.flat = torch.empty(kept.num_values, dtype=kept.dtype, device=self._device)
            kept.arrived = self._copy(self._inward, zip(kept.pieces(), kept.pages, strict=True), kept.left)

    def _copy(
        self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]], after: "torch.cuda.Event | None" = None
    ) -> "torch.cuda.Event | None":
        """Copies sources to targets, (target, source), behind all that is queued and an event. Returns the event of
        its end; None on a CPU, which copies at once."""
        if stream is None:
            for target, source in pairs:
                target[: source.numel()].copy_(source[: target.numel()])
            return None
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target[: source.numel()].copy_(source[: target.numel()], non_blocking=True)
        return stream.record_event()

    def _wait_for(self, event: "torch.cuda.Event | None") -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


class HostPages:
    """Host memory in pages of `PAGE` bytes, pinned if the device is a GPU, which are used again and again: pinning
    takes seconds, and rows of all lengths leave no holes.

    Args:
        device: the device with which copies are exchanged.

    Attributes:
        num_bytes: bytes that are allocated.
    """

    def __init__(self, device: torch.device):
        self.num_bytes = 0
        self._device = device
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> list[Tensor]:
        """Takes as many pages, uint8 [PAGE], as hold so many bytes."""
        count = -(-num_bytes // PAGE)
        while len(self._free) < count:
            slab = host_memory(SLAB * PAGE, [self._device])
            self.num_bytes += slab.numel()
            self._free += slab.split(PAGE)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[Tensor]) -> None:
        """Takes back pages that nobody reads or writes any more, but copies that are queued already."""
        self._free += pages


class _LayerCall:
    """One call of a layer, for one microbatch.

    Args:
        before: the call of the layer before, for the same microbatch.

    Attributes:
        kept: its activations.
    """

    def __init__(self, before: "_LayerCall | None"):
        self.before = before
        self.kept: list[weakref.ref[_Activation]] = []


class _Activation:
    """A tensor that a layer keeps for its backward.

    Attributes:
        flat: its values in the order of its memory, on the device; None while they are on the host alone.
        pages: its memory on the host.
        left, arrived: ends of the last copies to the host and back; None on a CPU, or if there is nothing to wait for.
    """

    def __init__(self, tensor: Tensor, call: _LayerCall):
        tensor = _without_holes(tensor)
        self.call, self.dtype = call, tensor.dtype
        self.shape, self.strides, self.num_values = tensor.shape, tensor.stride(), tensor.numel()
        self.num_bytes = self.num_values * tensor.element_size()
        self.flat: Tensor | None = tensor.as_strided((self.num_values,), (1,), tensor.storage_offset())
        self.pages: list[Tensor] = []
        self.left: torch.cuda.Event | None = None
        self.arrived: torch.cuda.Event | None = None

    def pieces(self) -> tuple[Tensor, ...]:
        """The bytes on the device, in pieces of a page."""
        assert self.flat is not None
        return self.flat.view(torch.uint8).split(PAGE)

    def __del__(self) -> None:
        if self.arrived is not None:  # brought back ahead, and never used: the copy ends before others get the memory
            torch.cuda.current_stream(self.arrived.device).wait_event(self.arrived)


def _without_holes(tensor: Tensor) -> Tensor:
    """The tensor, in contiguous memory of its own if its values are not next to each other in some order."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor if tensor.permute(by_stride).is_contiguous() else tensor.contiguous()


def _lasting(layer: nn.Module, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Tensors that stay on the device anyway: the layer's own, and what all layers get. Those of a unit within the
    layer, such as experts, are sharded here, and not among the tensors that it keeps."""
    yield from (own for own in (*layer.parameters(), *layer.buffers()) if not isinstance(own, DTensor))
    yield from tensors_in((args, kwargs))
