"""What every way to a generator does. `sync` drives it: connect once, then begin, (release, send)..., commit."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from automodel_rl.generator_messages import Committed
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.producer import Reach
from automodel_rl.weight_sync.slots import Slot, Slots


class Transport(ABC):
    """The way from this rank's buffers to its generator, or to all. Every method may raise WeightSyncError.

    Attributes:
        reach: whose buckets this rank needs to see.
        whole: tensors must not be cut.
    """

    reach: Reach
    whole = False

    @abstractmethod
    def connect(self, plans: Sequence[Plan], num_bytes: int, num_buffers: int) -> Slots:
        """Agrees on what will be sent, and makes the buffers. A collective; may be called again after a failure.

        Args:
            plans: of every sender.
            num_bytes: of a buffer.
            num_buffers: how many.
        """

    @abstractmethod
    def begin(self, version: int) -> None:
        """From here to `commit` the generator has no complete weights."""

    @abstractmethod
    def release(self, slot: Slot) -> None:
        """Waits until a slot may be filled again."""

    @abstractmethod
    def send(self, sender: int, number: int, slot: Slot) -> None:
        """Sends a bucket from a slot, on its stream."""

    @abstractmethod
    def commit(self, version: int, *, sums: bool) -> Committed:
        """All buckets are sent: waits until the generator has them, and returns what it says of them."""

    @abstractmethod
    def give_up(self) -> None:
        """Ends a weight sync that cannot be completed. Does not raise."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of what was opened. Does not raise."""
