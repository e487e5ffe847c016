"""Messages between a run and generators that join it, and their encoding.

    a generator sends      the run answers
    JoinRequest                Welcome, or a Failure and the end of the connection
    GeneratorStarted             UseVersion and Generate, in the order in which they apply; at the end of the run
    RunEnded Finished, GenerateFailed       nothing
    ReadingWeights              nothing: sent while it reads a version of the weights, which may take long
    Leaving                the end of the connection

All are JSON, validated on receipt. The exception is `Welcome`, which the generator unpickles: a run can execute code
on its generators, but not vice versa.
"""

import dataclasses
import json
import pickle
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from automodel_rl.compat.versions import own_version
from automodel_rl.generator_messages import (
    PROTOCOL,
    Failure,
    Finished,
    Generate,
    GenerateFailed,
    Message,
    ProtocolError,
    UseVersion,
)
from automodel_rl.generators.model_copy import ModelCopy
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.run_locations import WeightsServerInfo
from automodel_rl.generators.transformers_generator import TransformersSettings
from automodel_rl.launch.authenticated import MAX_FRAME_BYTES, AuthenticatedConnection

MAX_GENERATOR_MESSAGE_BYTES = 2**26
"""Longest message of a generator in bytes: a completion of a million tokens takes half of it."""

MAX_TEXT_LENGTH = 10_000
"""Longest error or reason kept of a generator, in characters."""

MAX_NAME_LENGTH = 200


def release() -> str:
    """Returns what both sides must have in common: the release of the package, and a hash of its messages."""
    return f"{own_version()} {PROTOCOL[:12]}"


@dataclass(frozen=True)
class JoinRequest(Message):
    """Request to join, with a description of the process. A generator that `evaluates` serves evaluations only."""

    name: str
    evaluates: bool = False
    release: str = field(default_factory=release)


@dataclass(frozen=True)
class Welcome(Message):
    """Settings with which a generator starts.

    Attributes:
        copy: the model for the transformers generator, which chooses its own device.
        writing: settings of that generator.
        vllm: vLLM options that follow from the run.
        timeout: the run's weight_sync.timeout, in seconds.
        weights: HTTP server of published weights, if any.
        newest: the generators' weight version; None before the first.
    """

    copy: ModelCopy
    writing: TransformersSettings
    vllm: dict[str, Any]
    timeout: float
    vocab_size: int
    weights: WeightsServerInfo | None = None
    newest: UseVersion | None = None


@dataclass(frozen=True)
class GeneratorStarted(Message):
    """The generator accepts weight versions and requests."""


@dataclass(frozen=True)
class Leaving(Message):
    """The generator stops, for the reason `text`. This does not count against its unfinished requests."""

    text: str


@dataclass(frozen=True)
class ReadingWeights(Message):
    """The generator is reading weights: a sign of life."""


@dataclass(frozen=True)
class RunEnded(Message):
    """The run has ended."""


@dataclass(frozen=True)
class _Reported:
    """The fields of a `Completion` that a joined generator reports."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "error"]
    error: str = ""
    versions: tuple[int, int] | None = None
    num_cached: int | None = None


_WRITTEN = TypeAdapter(_Reported)
_FROM_GENERATOR: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (JoinRequest, GeneratorStarted, ReadingWeights, Leaving, Finished, GenerateFailed)
}
_FROM_RUN: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (Failure, UseVersion, Generate, RunEnded)
}


class FromGenerator:
    """Decodes messages of a generator, with strict types of fields."""

    max_bytes = MAX_GENERATOR_MESSAGE_BYTES

    def decode(self, kind: str, content: bytes) -> Message:
        """Raises ValidationError, ValueError or KeyError if the message is invalid."""
        message: Message = _FROM_GENERATOR[kind].validate_json(content, strict=True)
        match message:
            case Finished(number, index, written):
                checked = _WRITTEN.validate_json(json.dumps(written), strict=True)
                if not all(0 <= number < 2**63 for number in (*(checked.versions or ()), checked.num_cached or 0)):
                    raise ValueError("invalid count")
                return Finished(
                    number, index, Completion(**{**vars(checked), "error": checked.error[:MAX_TEXT_LENGTH]})
                )
            case GenerateFailed(number, text):
                return GenerateFailed(number, text[:MAX_TEXT_LENGTH])
            case Leaving(text):
                return Leaving(text[:MAX_TEXT_LENGTH])
            case JoinRequest(name):
                return dataclasses.replace(message, name=name[:MAX_NAME_LENGTH])
        return message


class FromRun:
    """Decodes messages of a run, which has proved that it knows the key."""

    max_bytes = MAX_FRAME_BYTES

    def decode(self, kind: str, content: bytes) -> Message:
        if kind == Welcome.__name__:
            welcome: Welcome = pickle.loads(content)
            return welcome
        message: Message = _FROM_RUN[kind].validate_json(content, strict=True)
        return message


class MessageConnection:
    """Sends and receives messages: the name of each, a newline, and its fields. The other end has proved that it knows
    the key."""

    def __init__(self, connection: AuthenticatedConnection, incoming: FromGenerator | FromRun):
        self._connection, self._incoming = connection, incoming

    def send(self, message: Message) -> None:
        """Raises OSError if the other end is gone, TypeError if the message has fields that cannot be sent."""
        if isinstance(message, Finished) and isinstance(message.written, Completion):
            parts = {part.name: getattr(message.written, part.name) for part in dataclasses.fields(_Reported)}
            message = dataclasses.replace(message, written=parts)
        is_welcome = isinstance(message, Welcome)
        content = pickle.dumps(message) if is_welcome else json.dumps(message, default=_fields).encode()
        self._connection.send_bytes(type(message).__name__.encode() + b"\n" + content)

    def recv(self) -> Message:
        """Raises EOFError or OSError if the other end is gone, ProtocolError if the message is invalid."""
        received = self._connection.recv_bytes(self._incoming.max_bytes)
        kind, _, content = received.partition(b"\n")
        try:
            return self._incoming.decode(kind.decode(), content)
        except (ValidationError, ValueError, KeyError, RecursionError) as error:
            raise ProtocolError(f"it sent {received[:60]!r}, which is not a message ({type(error).__name__})") from None

    def poll(self, seconds: float = 0.0) -> bool:
        return self._connection.poll(seconds)

    def shutdown(self) -> None:
        """Ends the connection at both ends."""
        self._connection.shutdown()

    def close(self) -> None:
        """Closes this end."""
        self._connection.close()

    def __enter__(self) -> "MessageConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fields(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"a value of type {type(value).__name__} cannot be sent to a generator that has joined")
    return {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
