"""A rank's conversation with its generator about weights: messages that it sends, and answers that it expects."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from automodel_rl.errors import WeightSyncError
from automodel_rl.generator_messages import Agree, Agreed, Failure, GiveUp, Hello, Message
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.slots import wait_until

Answer = TypeVar("Answer", bound=Message)


class Channel(Protocol):
    """The rank's end of the conversation."""

    def send(self, message: Message) -> None:
        """Sends a message. Raises WeightSyncError if the generator is gone."""
        ...

    def ready(self) -> bool:
        """Whether an answer has come. Raises WeightSyncError if the generator is gone and no answer will come."""
        ...

    def receive(self) -> Message:
        """The next answer, once one is ready."""
        ...


def expect(channel: Channel, kind: type[Answer], seconds: float, watch: Callable[[], None] = lambda: None) -> Answer:
    """Waits for an answer.

    Args:
        channel: the channel to the generator.
        kind: the class of the answer.
        seconds: longest wait.
        watch: called now and then; raises if there is no use in waiting any longer.

    Raises:
        WeightSyncError: the answer did not come, or reports a failure.
    """
    wait_until(channel.ready, _answer(kind), seconds, watch)
    match channel.receive():
        case Failure(text):
            raise WeightSyncError(text)
        case kind() as answer:
            return answer
        case other:
            raise WeightSyncError(f"the generator answered {type(other).__name__} where {kind.__name__} was due")


def greet(channel: Channel, plans: Sequence[Plan], seconds: float) -> None:
    """Drops answers that are left of earlier weight syncs, and agrees with the generator on what will be sent.

    Raises:
        WeightSyncError: names, shapes or dtypes are not the generator's.
    """
    hello = Hello(next(_GREETINGS))
    channel.send(hello)
    while True:
        wait_until(channel.ready, _answer(Hello), seconds, lambda: None)
        if channel.receive() == hello:
            break
    channel.send(Agree(list(plans)))
    expect(channel, Agreed, seconds)


def _answer(kind: type[Message]) -> str:
    return f"the generator's answer ({kind.__name__})"


_GREETINGS = itertools.count()


def patience(seconds: float) -> float:
    """Seconds that a generator waits for its rank: longer than a rank waits, which other ranks may hold up."""
    return 2 * seconds + 5


def end_quietly(channel: Channel) -> None:
    """Ends the weight sync for the generator, if the generator is still there."""
    with contextlib.suppress(WeightSyncError):
        channel.send(GiveUp())
