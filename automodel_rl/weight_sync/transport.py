"""Interface of all transports. A sender of weights calls `connect` once, and for each sync `begin`, `send_all` and
`commit`."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.producer import Reach
from automodel_rl.weight_sync.slots import Slot, Slots


class Transport(ABC):
    """Sends this rank's buffers to its generator, or to all. Methods may raise WeightSyncError.

    Attributes:
        reach: the stages whose buckets this rank fills: its own, or all.
        whole: never split a tensor over buckets.
    """

    reach: Reach
    whole = False

    @abstractmethod
    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        """Agrees with the generator on the senders' plans, and creates the buffers. A collective; may be repeated
        after a failure."""

    @abstractmethod
    def begin(self, version: int, *, frozen: bool) -> None:
        """Begins a weight sync. Until `commit` the generator's weights are incomplete."""

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Waits until the slot may be refilled."""

    @abstractmethod
    def send(self, sender: int, number: int, slot: Slot) -> None:
        """Sends a bucket from the slot, on the slot's stream."""

    def send_all(
        self,
        slots: Slots,
        turns: Iterable[tuple[int, int]],
        fill: Callable[[int, int, Slot], None],
        attempt: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """Sends buckets through a ring of slots, so that one is sent while the next is filled.

        Args:
            turns: the buckets in order, by sender and number.
            fill: writes a bucket into a slot, on the current stream.
            attempt: calls each part of this transport's work; may catch its errors.
        """
        slots.fork_streams()
        for turn, (sender, number) in enumerate(turns):
            slot = slots[turn]
            attempt(functools.partial(self.release, slot))
            with slot.active():
                fill(sender, number, slot)
                attempt(functools.partial(self.send, sender, number, slot))
            slot.mark()
        slots.join_streams()

    @abstractmethod
    def commit(self, version: int, *, sums: bool) -> Committed:
        """Waits until the generator has all buckets, and returns its report, with checksums if `sums`."""

    @abstractmethod
    def abort(self) -> None:
        """Abandons a failed weight sync. Does not raise."""

    @abstractmethod
    def close(self) -> None:
        """Releases connections and buffers. Does not raise."""
