"""What a rank and the process of its engine say to each other about a sync. Tuples, the kind first.

    ("hello", number)                    -> ("hello", number)         what was said before is forgotten
    ("agree", plans)                     -> ("agreed",)
    ("open", shared buffers)             -> ("opened", event handles)
    ("room", size, number of buffers)    -> ("room", number that fit)
    ("join", JoinOrder)                  -> ("joined",)
    ("leave",)                           -> ("left",)              all links
    ("begin", version, seconds)             from here on the engine has no complete weights
      ("bucket", sender, number, slot)   -> ("taken", slot)           a shared buffer is filled
      ("receive",)                       -> ("received",)             all buckets come over links
      ("commit", checksums wanted)       -> ("committed", version, checksums or None)
      ("give up",)                          the update ends without a commit

("error", text) may take the place of any answer.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from automodel_rl.errors import WeightSyncError
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.link import Address
from automodel_rl.weight_sync.slots import wait_until

Message = tuple[Any, ...]


@dataclass(frozen=True)
class JoinOrder:
    """Which links an engine joins.

    Attributes:
        address: of their store.
        num_senders: links, one for each.
        engine, num_engines: its place among all engines, which all join all links.
        seconds: longest wait for a peer.
    """

    address: Address
    num_senders: int
    engine: int
    num_engines: int
    seconds: float


class Channel(Protocol):
    """The rank's end."""

    def tell(self, message: Message) -> None:
        """Raises WeightSyncError if the engine is gone."""
        ...

    def ready(self) -> bool:
        """Whether an answer has come. Raises WeightSyncError if the engine is gone and none will."""
        ...

    def hear(self) -> Message:
        """The next answer, once one is ready."""
        ...


def expect(channel: Channel, kind: str, seconds: float, watch: Callable[[], None] = lambda: None) -> Message:
    """Waits for an answer, and returns what it says after its kind.

    Args:
        channel: to the engine.
        kind: of the answer.
        seconds: longest wait.
        watch: raises if there is no use in waiting any longer.

    Raises:
        WeightSyncError: it did not come, or is an error.
    """
    wait_until(channel.ready, f"the engine's answer ({kind})", seconds, watch)
    got, *rest = channel.hear()
    if got == "error":
        raise WeightSyncError(rest[0])
    if got != kind:
        raise WeightSyncError(f"the engine answered {got!r} where {kind!r} was due")
    return tuple(rest)


def greet(channel: Channel, plans: Sequence[Plan], seconds: float) -> None:
    """Forgets what is left of earlier updates, and agrees on what will be sent.

    Raises:
        WeightSyncError: names, shapes or dtypes are not the engine's.
    """
    hello = ("hello", next(_GREETINGS))
    channel.tell(hello)
    answer: Message = ()
    while answer != hello:
        wait_until(channel.ready, "the engine's answer (hello)", seconds, lambda: None)
        answer = channel.hear()
    channel.tell(("agree", list(plans)))
    expect(channel, "agreed", seconds)


_GREETINGS = itertools.count()


def patience(seconds: float) -> float:
    """How long an engine waits for a rank that waits so long for its own: ranks may be held up by another's engine."""
    return 2 * seconds + 5


def end_quietly(channel: Channel) -> None:
    """Ends an update on the other side, if there still is one."""
    with contextlib.suppress(WeightSyncError):
        channel.tell(("give up",))
