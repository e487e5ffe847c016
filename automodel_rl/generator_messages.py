"""Messages between a rank and the process of its generator.

They are pickled, over the pipe of `rollout/child_process.py`. This file imports the standard library alone: vLLM's
worker loads it by its path, in an environment that has nothing else of this package.

    a rank sends                                     the process answers
    Start                                            Started
    Generate                                         Completions, or Failed
    Hello                                            Hello, with the same number
    weights for this package's own generator:
    Agree, OpenBuffers, MakeRoom, Join, Leave        Agreed, Opened, Room, Joined, Left
    Begin, then Bucket... or Receive, then Commit    Taken..., Received, Committed
    weights for vLLM:
    InitTransfer                                     Ready
    Begin, then LoadWeights..., then Commit          Loaded..., Committed
    GiveUp, in place of Commit

`Failure` may take the place of any answer but those to Generate.
"""

import dataclasses
import hashlib
import pickle
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


class ProtocolError(RuntimeError):
    """The two sides do not know the same messages."""


class Message:
    """The base of all messages."""


@dataclass(frozen=True)
class Request:
    """One completion to write.

    Attributes:
        prompt: token ids.
        seed: of its sampling; the same seed, prompt and weights give the same completion, whatever it is batched with.
        temperature: of its sampling; 0 takes the likeliest token.
    """

    prompt: list[int]
    seed: int
    temperature: float


@dataclass(frozen=True)
class Written:
    """A completion as a worker or server reports it, before the rank has checked it.

    Attributes:
        token_ids: the completion's, the token that ended it included.
        logprobs: one for each token, under the distribution it was sampled from.
        finish: why it ended, in the generator's own words: "stop", "length" or another one.
        oldest, newest: versions of the weights that wrote it, None if they are not known.
        routes: experts of its tokens and its prompt's, in a form that `read_routes` takes; None if they are not known.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: str
    oldest: int | None = None
    newest: int | None = None
    routes: Any = None


@dataclass(frozen=True)
class VllmSettings:
    """How vLLM starts.

    Attributes:
        options: of vllm.LLM.
        sampling: of vllm.SamplingParams, the same for every request.
    """

    options: dict[str, Any]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Start(Message):
    """The first message: starts the generator.

    Attributes:
        settings: `VllmSettings`, or what the package's own worker takes.
        protocol: fingerprint of the messages that the rank knows.
    """

    settings: Any
    protocol: str = field(default_factory=lambda: PROTOCOL)


@dataclass(frozen=True)
class Started(Message):
    """The generator can write."""


@dataclass(frozen=True)
class Failure(Message):
    """What was asked for could not be done.

    Attributes:
        text: why, in one line.
    """

    text: str


@dataclass(frozen=True)
class Generate(Message):
    """Completions to write, under a number of the rank's."""

    number: int
    requests: list[Request]


@dataclass(frozen=True)
class Completions(Message):
    """All completions of the `Generate` with that number, in the order of its requests."""

    number: int
    written: list[Written]


@dataclass(frozen=True)
class Failed(Message):
    """The `Generate` with that number failed as a whole, and why."""

    number: int
    text: str


@dataclass(frozen=True)
class Hello(Message):
    """Opens a conversation about weights: answers to what was sent before it are void."""

    number: int


@dataclass(frozen=True)
class Agree(Message):
    """What every sender will send: one `hf.buckets.Plan` for each."""

    plans: list[Any]


@dataclass(frozen=True)
class Agreed(Message):
    """Names, shapes and dtypes are the generator's."""


@dataclass(frozen=True)
class OpenBuffers(Message):
    """Buffers to share: `weight_sync.shared_memory.SharedBuffer`s."""

    buffers: list[Any]


@dataclass(frozen=True)
class Opened(Message):
    """The buffers are open; handles of the events after reading each, on CUDA."""

    handles: list[bytes]


@dataclass(frozen=True)
class MakeRoom(Message):
    """Buffers of the generator's own to make."""

    num_bytes: int
    num_buffers: int


@dataclass(frozen=True)
class Room(Message):
    """How many buffers fitted."""

    num_buffers: int


@dataclass(frozen=True)
class Join(Message):
    """Links to join, one for each sender.

    Attributes:
        address: of their store, a `weight_sync.link.Address`.
        num_senders: how many links.
        generator, num_generators: this one's place among all generators, which all join all links.
        seconds: longest wait for a peer.
    """

    address: Any
    num_senders: int
    generator: int
    num_generators: int
    seconds: float


@dataclass(frozen=True)
class Joined(Message):
    """All links are joined."""


@dataclass(frozen=True)
class Leave(Message):
    """Lets go of all links."""


@dataclass(frozen=True)
class Left(Message):
    """No link is open."""


@dataclass(frozen=True)
class InitTransfer(Message):
    """How vLLM's workers meet the sender, in vLLM's own terms."""

    info: dict[str, Any]


@dataclass(frozen=True)
class Ready(Message):
    """vLLM's workers have met the sender."""


@dataclass(frozen=True)
class Begin(Message):
    """Begins a weight sync: from here to its commit the generator has no complete weights.

    Attributes:
        version: that the weights will have.
        seconds: longest silence of the rank.
    """

    version: int
    seconds: float


@dataclass(frozen=True)
class Bucket(Message):
    """A shared buffer is filled with a bucket of that sender."""

    sender: int
    number: int
    slot: int


@dataclass(frozen=True)
class Taken(Message):
    """A shared buffer is read."""

    slot: int


@dataclass(frozen=True)
class Receive(Message):
    """All buckets come over links."""


@dataclass(frozen=True)
class Received(Message):
    """All buckets have come."""


@dataclass(frozen=True)
class LoadWeights(Message):
    """Tensors for vLLM to load, in vLLM's own terms."""

    info: dict[str, Any]


@dataclass(frozen=True)
class Loaded(Message):
    """vLLM has loaded them."""


@dataclass(frozen=True)
class Commit(Message):
    """All weights are sent; whether checksums of the generator's tensors are wanted."""

    sums: bool


@dataclass(frozen=True)
class Committed(Message):
    """The weight sync is complete.

    Attributes:
        version: of the generator's weights.
        checksums: of its tensors by name, if they were wanted.
    """

    version: int | None
    checksums: dict[str, int] | None = None


@dataclass(frozen=True)
class GiveUp(Message):
    """Ends a weight sync without a commit."""


def receive_start(connection: Connection) -> Start:
    """The first message of a rank.

    Raises:
        ProtocolError: the rank knows other messages than this process.
        EOFError: the rank is gone.
    """
    try:
        message = connection.recv()
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise ProtocolError(f"{OTHER_VERSION} ({error})") from None
    if not isinstance(message, Start) or vars(message).get("protocol") != PROTOCOL:
        raise ProtocolError(OTHER_VERSION)
    return message


def unknown(message: object) -> ProtocolError:
    """The error of a message that its receiver does not handle, or not at this point."""
    return ProtocolError(f"the generator got {type(message).__name__}, which it does not know, or not at this point")


OTHER_VERSION = (
    "the rank and its generator's process have different versions of automodel_rl/generator_messages.py, as after an "
    "upgrade in the midst of a run: start the run again"
)


def _fingerprint() -> str:
    """Changes with every name of a message or of one of its fields."""
    classes = {name: value for name, value in globals().items() if dataclasses.is_dataclass(value)}
    lines = [f"{name}: {[part.name for part in dataclasses.fields(value)]}" for name, value in classes.items()]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


PROTOCOL: str = _fingerprint()
"""Fingerprint of the messages that this side knows."""
