"""Messages between a rank and its generator's process.

They are pickled for the pipe of `generators/child_process.py`. This file imports only the standard library: vLLM's
worker loads it by path, in an environment without the rest of this package.

    a rank sends      the process answers
    Start             an Answer to "start", with a line for the console, or empty
    Generate          Finished for each completion, as soon as it is complete, or GenerateFailed
    Hello             Hello, with the same number
    Call              an Answer to its verb; none to "begin" and "abort", and none to the remaining calls of a
                      failed weight sync

A `Call` is one of `VERBS` with its arguments. `Failure` may replace any answer except those to Generate, and may
arrive unsolicited.
"""

import dataclasses
import hashlib
import pickle
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

Verb = Literal[
    "agree",
    "open_buffers",
    "allocate_buffers",
    "join",
    "leave",
    "bucket",
    "receive",
    "init_transfer",
    "load_weights",
    "load_adapter",
    "begin",
    "commit",
    "abort",
    "sleep",
    "wake",
]


class ProtocolError(RuntimeError):
    """Rank and process have different message protocols."""


class Message:
    """Base class of all messages."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a completion.

    Attributes:
        max_tokens: maximum length of the completion.
        temperature: 0 takes the most likely token.
        top_p: probability mass of the most likely tokens that are sampled from.
        top_k: number of most likely tokens that are sampled from; 0 for all.
        stop: texts that end it.
        stop_token_ids: tokens that end it; None for those the generator was started with.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None

    @property
    def is_truncated(self) -> bool:
        """Whether top-p or top-k excludes tokens."""
        return self.top_p < 1 or self.top_k > 0

    def for_vllm(self, ends: tuple[int, ...]) -> dict[str, Any]:
        """Returns arguments of vllm.SamplingParams. `ends` are the end tokens if `stop_token_ids` is None."""
        own_ends = ends if self.stop_token_ids is None else self.stop_token_ids
        ended_by = {"max_tokens": self.max_tokens, "stop_token_ids": [*own_ends], "ignore_eos": True}
        if self.stop:
            # By default vLLM drops special tokens before it searches, so a stop text with one would never match.
            ended_by |= {"stop": [*self.stop], "include_stop_str_in_output": True, "skip_special_tokens": False}
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, **ended_by}


@dataclass(frozen=True)
class PromptMedia:
    """Media in a prompt. `kind` is the type of the message part; other fields as in `batch.Image`, `Video` or
    `Audio`."""

    kind: str
    start: int
    num_tokens: int
    size: tuple[int, ...]
    source: str | bytes | tuple[str, ...]
    interval: float = 1.0
    framed: bool = False


@dataclass(frozen=True)
class Request:
    """Request for one completion.

    Attributes:
        prompt: token ids.
        seed: the same seed, prompt and weights give the same completion in any batch.
        conversation: number shared by all turns of a conversation, so that one generator writes them; None if there
            is none.
        media: the prompt's images and clips, in order.
        rollouts: number of the rollouts that the routes are kept for; None if no routes are needed.
        routes_from: index of the first prompt token whose routes are kept; earlier ones are known.
    """

    prompt: list[int]
    seed: int
    sampling: Sampling
    conversation: int | None = None
    media: tuple[PromptMedia, ...] = ()
    rollouts: int | None = None
    routes_from: int = 0


@dataclass(frozen=True)
class RawCompletion:
    """A completion as reported by a worker or server, before the rank has checked it.

    Attributes:
        token_ids: ids of the completion, including the token that ended it.
        logprobs: log-probability of each token under the distribution it was sampled from.
        finish: reason in the generator's terms: "stop", "length" or another one.
        oldest, newest: weight syncs whose weights wrote the oldest and newest part, if known.
        routes: experts of prompt and completion tokens, in a form that `read_routes` accepts; None if unknown.
        num_cached: prompt tokens found in the prefix cache; None if unknown.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: str
    oldest: int | None = None
    newest: int | None = None
    routes: Any = None
    num_cached: int | None = None


@dataclass(frozen=True)
class VllmSettings:
    """Arguments of vllm.LLM, and the default end tokens of requests."""

    options: dict[str, Any]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Start(Message):
    """First message, which starts the generator with `VllmSettings` or the settings of this package's own worker.
    `protocol` is the rank's message fingerprint."""

    settings: Any
    protocol: str = field(default_factory=lambda: PROTOCOL)


@dataclass(frozen=True)
class Failure(Message):
    """The process could not do what the rank requested; `text` is the reason, in one line."""

    text: str


@dataclass(frozen=True)
class Generate(Message):
    """Completions to write. The answers carry the same number."""

    number: int
    requests: list[Request]


@dataclass(frozen=True)
class UseVersion(Message):
    """Makes a joined generator, which reads published weights itself, use a version for all later requests.

    `digest` is the version's hash, and `policy_version` the fleet's number for these weights.
    """

    version: int
    digest: str
    policy_version: int


@dataclass(frozen=True)
class Finished(Message):
    """A completion, sent as soon as it is complete. `index` is its request's index in the `Generate` of this number.
    A process sends a `RawCompletion`; its rank forwards the result that it has made of it."""

    number: int
    index: int
    written: Any


@dataclass(frozen=True)
class GenerateFailed(Message):
    """The `Generate` with this number failed as a whole; `text` is the reason."""

    number: int
    text: str


@dataclass(frozen=True)
class Hello(Message):
    """Start of an exchange about weights. Answers to earlier weight messages no longer count."""

    number: int


@dataclass(frozen=True)
class Call(Message):
    """A command, by its verb.

    Attributes:
        arguments: as named in `VERBS`.

    Raises:
        ProtocolError: unknown verb, or wrong number of arguments.
    """

    verb: Verb
    arguments: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise ProtocolError(f"unknown verb {self.verb}")
        names, _ = VERBS[self.verb]
        if len(names) != len(self.arguments):
            raise ProtocolError(
                f"{self.verb} takes {', '.join(names) or 'nothing'}, not {len(self.arguments)} arguments"
            )


@dataclass(frozen=True)
class Answer(Message):
    """A completed call, or the started process; `value` is the result."""

    verb: Verb | Literal["start"]
    value: Any = None


@dataclass(frozen=True)
class Committed:
    """Result of "commit" and "load_adapter": the generator has the weights of this weight sync. `checksums` are
    those of its tensors, if requested."""

    version: int | None
    checksums: dict[str, int] | None = None


VERBS: dict[Verb, tuple[tuple[str, ...], str]] = {
    # Weights for this package's own generator.
    # Plans of all senders (hf.buckets.Plan); answered if names, shapes and dtypes match the generator's tensors.
    "agree": (("plans",), ""),
    # Buffers to share (weight_sync.shared_memory.SharedBuffer). On CUDA the handles are of events that are recorded
    # once each buffer has been read.
    "open_buffers": (("buffers",), "handles"),
    # Allocates receive buffers, as many as fit.
    "allocate_buffers": (("num_bytes", "num_buffers"), "num_buffers"),
    # Links, one per sender, at the weight_sync.link.Address of their store. Every generator joins all links, under
    # its number from 0. `seconds` is the longest wait for a peer.
    "join": (("address", "num_senders", "generator", "num_generators", "seconds"), ""),
    "leave": ((), ""),
    # A sender has filled shared buffer `slot` with bucket `number` of its plan; answered once read.
    "bucket": (("sender", "number", "slot"), "slot"),
    # Receives buckets over the links: all, or those that are not frozen. Answered once all have arrived.
    "receive": (("frozen",), ""),
    # Weights for vLLM: arguments of vLLM's weight transfer.
    "init_transfer": (("info",), ""),
    "load_weights": (("info",), ""),
    # Adapters alone, in PEFT's format in a folder that exists until the answer. Completions in progress finish with
    # the adapter they started with.
    "load_adapter": (("version", "folder"), "Committed"),
    # A weight sync: begin, then buckets, receive or load_weights, then commit or abort. Weights are incomplete in
    # between. `seconds` is the longest silence of the rank; `sums` requests checksums of the generator's tensors.
    "begin": (("version", "seconds"), ""),
    "commit": (("sums",), "Committed"),
    "abort": ((), ""),
    # vLLM's memory: freed once all completions are written (level 1 keeps weights on the host), and allocated again,
    # first for its weights and then for its kv_cache.
    "sleep": (("level",), ""),
    "wake": (("what",), ""),
}
"""Commands of a process: the names of the arguments, and of the answer."""


def name_of(message: object) -> str:
    """Returns a message's name for errors."""
    return message.verb if isinstance(message, Call | Answer) else type(message).__name__


def receive_start(connection: Connection) -> Start:
    """Receives the first message of a rank.

    Raises:
        ProtocolError: rank and process have different protocols.
        EOFError: the rank has exited.
    """
    try:
        message = connection.recv()
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise ProtocolError(f"{OTHER_VERSION} ({error})") from None
    if not isinstance(message, Start) or vars(message).get("protocol") != PROTOCOL:
        raise ProtocolError(OTHER_VERSION)
    return message


def unknown(message: object) -> ProtocolError:
    """Returns the error for a message that its receiver does not handle, or not at this point."""
    return ProtocolError(f"the generator received an unknown or unexpected message: {name_of(message)}")


OTHER_VERSION = (
    "the rank and its generator's process have different versions of automodel_rl/generator_messages.py: restart"
)


def _fingerprint() -> str:
    """A hash of the names of all messages, their fields, the verbs, their arguments and answers."""
    classes = {name: value for name, value in globals().items() if dataclasses.is_dataclass(value)}
    lines = [f"{name}: {[part.name for part in dataclasses.fields(value)]}" for name, value in classes.items()]
    lines += [f"{verb}: {both}" for verb, both in VERBS.items()]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


PROTOCOL: str = _fingerprint()
"""Fingerprint of the messages known to this side."""
