"""The interface of every way to a generator. `sync` calls connect once; then, for every sync, begin, release and
send for each buffer, and commit."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.producer import Reach
from automodel_rl.weight_sync.slots import Slot, Slots


class Transport(ABC):
    """The way from this rank's buffers to its generator, or to all. Every method may raise WeightSyncError.

    Attributes:
        reach: the stages whose buckets this rank fills: its own, or all.
        whole: whether tensors must not be cut.
    """

    reach: Reach
    whole = False

    @abstractmethod
    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        """Agrees on what will be sent, and makes the buffers. A collective; may be called again after a failure.

        Args:
            plans: the plan of every sender.
            num_bytes: size of a buffer.
            num_buffers: number of buffers.
        """

    @abstractmethod
    def begin(self, version: int, *, frozen: bool) -> None:
        """Begins a weight sync. Until `commit` the generator has no complete weights.

        Args:
            version: the number of this weight sync.
            frozen: whether it sends frozen tensors, too.
        """

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Waits until a slot may be filled again."""

    @abstractmethod
    def send(self, sender: int, number: int, slot: Slot) -> None:
        """Sends a bucket from a slot, on its stream."""

    @abstractmethod
    def commit(self, version: int, *, sums: bool) -> Committed:
        """Ends a weight sync: waits until the generator has all buckets, and returns its report.

        Args:
            version: the number of this weight sync.
            sums: ask for a checksum of every tensor.
        """

    @abstractmethod
    def give_up(self) -> None:
        """Ends a weight sync that cannot be completed. Does not raise."""

    @abstractmethod
    def close(self) -> None:
        """Releases what was opened. Does not raise."""
