"""A rank's conversation with its generator: what it calls for, and the answers that it expects."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from automodel_rl.errors import WeightSyncError
from automodel_rl.generator_messages import Answer, Call, Failure, Hello, Message, Verb, name_of
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.slots import wait_until


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


def tell(channel: Channel, verb: Verb, *arguments: Any) -> None:
    """Calls for something. What is answered must be taken by `expect`.

    Raises:
        WeightSyncError: the generator is gone.
    """
    channel.send(Call(verb, arguments))


def expect(channel: Channel, verb: Verb, seconds: float, watch: Callable[[], None] = lambda: None) -> Any:
    """Waits for the answer to an earlier call, and returns the value of the answer.

    Args:
        channel: the channel to the generator.
        verb: the verb of the call.
        seconds: longest wait.
        watch: called now and then; raises if there is no use in waiting any longer.

    Raises:
        WeightSyncError: the answer did not come, or reports a failure.
    """
    wait_until(channel.ready, f"the generator's answer ({verb})", seconds, watch)
    match channel.receive():
        case Failure(text):
            raise WeightSyncError(text)
        case Answer(answered, value) if answered == verb:
            return value
        case other:
            raise WeightSyncError(f"the generator answered {name_of(other)} where {verb} was due")


def call(channel: Channel, verb: Verb, *arguments: Any, seconds: float) -> Any:
    """Calls for something, waits for the answer, and returns its value. It raises the same as `expect`."""
    tell(channel, verb, *arguments)
    return expect(channel, verb, seconds)


def greet(channel: Channel, plans: Sequence[Plan], seconds: float) -> None:
    """Drops answers that are left of earlier weight syncs, and agrees with the generator on what will be sent.

    Raises:
        WeightSyncError: names, shapes or dtypes are not the generator's.
    """
    hello = Hello(next(_GREETINGS))
    channel.send(hello)
    while True:
        wait_until(channel.ready, "the generator's answer (hello)", seconds, lambda: None)
        if channel.receive() == hello:
            break
    call(channel, "agree", list(plans), seconds=seconds)


_GREETINGS = itertools.count()


def patience(seconds: float) -> float:
    """Seconds that a generator waits for its rank: longer than a rank waits, which other ranks may hold up."""
    return 2 * seconds + 5


def end_quietly(channel: Channel) -> None:
    """Ends the weight sync for the generator, if the generator is still there."""
    with contextlib.suppress(WeightSyncError):
        tell(channel, "give_up")
