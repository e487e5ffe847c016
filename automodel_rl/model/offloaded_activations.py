"""Activation offloading: tensors that layers save for the backward are kept in host memory, except for the last few
layers.

Copies run on their own streams: to the host while the next layer computes, back one layer ahead of the backward. They
are exact.
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
"""Bytes per page of host memory."""

SLAB = 64
"""Pages allocated and pinned at a time."""

ON_DEVICE = 3
"""Maximum number of layers whose activations are on the device: two in the forward, while being copied, and one
fetched ahead in the backward."""


class OffloadedActivations:
    """Keeps layers' saved tensors on the host: with full recomputation each layer's input and, for compiled dense
    layers, the attention result. A CPU's "host" is its own memory, so nothing is saved there."""

    def __init__(self, device: torch.device):
        self.pages = HostPages(device)
        self._device = device
        self._outward, self._inward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._leaving: deque[weakref.ref[_Activation]] = deque()
        self._last: _LayerCall | None = None

    def install(self, layers: Iterable[Any]) -> None:
        """Wraps the forwards of a part's layers, given in calling order. Their first argument is hidden states
        [1, t, H]."""
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
        """Starts copying a tensor of at least `least` values to the host, unless it stays on the device anyway."""
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
        """Frees the device memory of activations on the host, except those of a call and the one before."""
        while self._leaving:
            kept = self._leaving[0]()
            if kept is not None and kept.call in (call, call.before):
                return
            self._leaving.popleft()
            if kept is not None:
                self._wait_for(kept.left)  # later users of the memory are queued after this
                kept.flat = None

    def _bring_back(self, kept: "Tensor | _Activation") -> Tensor:
        """Returns the tensor on the device, and starts fetching the previous layer's."""
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
        """Starts the copy to the device, unless it is done or under way."""
        if kept.flat is None:
            kept.flat = torch.empty(kept.num_values, dtype=kept.dtype, device=self._device)
            kept.arrived = self._copy(self._inward, zip(kept.pieces(), kept.pages, strict=True), kept.left)

    def _copy(
        self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]], after: "torch.cuda.Event | None" = None
    ) -> "torch.cuda.Event | None":
        """Copies (target, source) pairs after all queued work and `after`. Returns the end event; None on a CPU,
        which copies at once."""
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
    """Host memory in reusable pages of `PAGE` bytes, pinned if the device is a GPU. Pinning takes seconds, and pages
    avoid fragmentation by rows of all lengths."""

    def __init__(self, device: torch.device):
        self.num_bytes = 0
        self._device = device
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> list[Tensor]:
        """Takes enough pages, uint8 [PAGE] each, for `num_bytes`."""
        count = -(-num_bytes // PAGE)
        while len(self._free) < count:
            slab = host_memory(SLAB * PAGE, [self._device])
            self.num_bytes += slab.numel()
            self._free += slab.split(PAGE)
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[Tensor]) -> None:
        """Returns pages to the pool. Only copies queued earlier may still use them."""
        self._free += pages


class _LayerCall:
    """One call of a layer for one microbatch. `before` is the previous layer's call for it, `kept` its activations."""

    def __init__(self, before: "_LayerCall | None"):
        self.before = before
        self.kept: list[weakref.ref[_Activation]] = []


class _Activation:
    """A tensor that a layer saves for its backward.

    Attributes:
        flat: its values on the device in memory order; None while only on the host.
        pages: its memory on the host.
        left, arrived: end events of the copies to the host and back; None on a CPU or with nothing to wait for.
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
        """Returns the device bytes in page-sized pieces."""
        assert self.flat is not None
        return self.flat.view(torch.uint8).split(PAGE)

    def __del__(self) -> None:
        if self.arrived is not None:  # fetched ahead but never used: the copy must end before the memory is reused
            torch.cuda.current_stream(self.arrived.device).wait_event(self.arrived)


def _without_holes(tensor: Tensor) -> Tensor:
    """Returns the tensor, copied to contiguous memory if its values are not dense in any dimension order."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor if tensor.permute(by_stride).is_contiguous() else tensor.contiguous()


def _lasting(layer: nn.Module, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yields tensors that stay on the device anyway: the layer's own, and its arguments. FSDP units within the layer,
    such as experts, are still sharded here and never among the saved tensors."""
    yield from (own for own in (*layer.parameters(), *layer.buffers()) if not isinstance(own, DTensor))
    yield from tensors_in((args, kwargs))
