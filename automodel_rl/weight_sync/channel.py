"""A rank's channel to its generator: calls, and the answers expected to them."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from automodel_rl.errors import WeightSyncError
from automodel_rl.generator_messages import Answer, Call, Failure, Hello, Message, Verb, name_of
from automodel_rl.hf.buckets import Plan
from automodel_rl.weight_sync.slots import wait_until


class Channel(Protocol):
    def send(self, message: Message) -> None:
        """Sends a message. Raises WeightSyncError if the generator is gone."""
        ...

    def ready(self) -> bool:
        """Returns whether an answer has arrived. Raises WeightSyncError if the generator is gone without one."""
        ...

    def receive(self) -> Message: ...


def send_call(channel: Channel, verb: Verb, *arguments: Any) -> None:
    """Sends a call. An answer must be received by `expect`. Raises WeightSyncError if the generator is gone."""
    channel.send(Call(verb, arguments))


def expect(channel: Channel, verb: Verb, seconds: float, watch: Callable[[], None] = lambda: None) -> Any:
    """Returns the value of the answer to an earlier call.

    Args:
        watch: called now and then; raises if waiting is pointless.

    Raises:
        WeightSyncError: no answer came within `seconds`, or it reports a failure.
    """
    wait_until(channel.ready, f"the generator's answer ({verb})", seconds, watch)
    match channel.receive():
        case Failure(text):
            raise WeightSyncError(text)
        case Answer(answered, value) if answered == verb:
            return value
        case other:
            raise WeightSyncError(f"the generator answered {name_of(other)} instead of {verb}")


def call(channel: Channel, verb: Verb, *arguments: Any, seconds: float) -> Any:
    """Sends a call, and returns the value of its answer."""
    send_call(channel, verb, *arguments)
    return expect(channel, verb, seconds)


def handshake(channel: Channel, plans: Sequence[Plan], seconds: float) -> None:
    """Drops answers to earlier syncs, and agrees with the generator on the senders' plans."""
    hello = Hello(next(_GREETINGS))
    channel.send(hello)
    while True:
        wait_until(channel.ready, "the generator's answer (hello)", seconds, lambda: None)
        if channel.receive() == hello:
            break
    call(channel, "agree", list(plans), seconds=seconds)


_GREETINGS = itertools.count()


def generator_timeout(seconds: float) -> float:
    """Returns how long a generator waits for its rank: longer than `seconds`, as other ranks may delay it."""
    return 2 * seconds + 5


def abort_quietly(channel: Channel) -> None:
    with contextlib.suppress(WeightSyncError):
        send_call(channel, "abort")
