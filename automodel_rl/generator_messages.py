"""Messages between a rank and the process of its generator.

They are pickled for the pipe of `generators/child_process.py`. This file imports only the standard library: vLLM's
worker loads it by its path, in an environment that has nothing else of this package.

    a rank sends      the process answers
    Start             an Answer to "start", with a line for the console, or empty
    Generate          Finished for each completion, as soon as it is written, or Failed
    Hello             Hello, with the same number
    Call              an Answer to its verb; none to "begin" and "give_up", and none to what is left of a weight sync
                      that has failed

A `Call` is one of `VERBS` with its arguments. `Failure` may replace any answer, except the answers to Generate, and
may come where none is due.
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
    "make_room",
    "join",
    "leave",
    "bucket",
    "receive",
    "init_transfer",
    "load_weights",
    "load_adapter",
    "begin",
    "commit",
    "give_up",
    "sleep",
    "wake",
]


class ProtocolError(RuntimeError):
    """The rank and the process know other messages."""


class Message:
    """The base of all messages."""


@dataclass(frozen=True)
class Sampling:
    """How a completion is sampled.

    Attributes:
        max_tokens: most tokens of the completion.
        temperature: the temperature of sampling; 0 takes the likeliest token.
        top_p, top_k: the share of probability, and the number of tokens (0 for all), that are sampled, likeliest first.
        stop: texts that end it.
        stop_token_ids: tokens that end it; None for those with which the generator was started.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0

    def for_vllm(self, ends: tuple[int, ...]) -> dict[str, Any]:
        """Arguments of vllm.SamplingParams, given the tokens that end a completion if `stop_token_ids` is None."""
        own_ends = ends if self.stop_token_ids is None else self.stop_token_ids
        ended_by = {"max_tokens": self.max_tokens, "stop_token_ids": [*own_ends], "ignore_eos": True}
        if self.stop:
            # Else vLLM looks for texts where special tokens are left out, and one with such a token never ends any.
            ended_by |= {"stop": [*self.stop], "include_stop_str_in_output": True, "skip_special_tokens": False}
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, **ended_by}


@dataclass(frozen=True)
class PromptMedia:
    """Media in a prompt: `kind` is the type of a message's part, the rest as in `batch.Image`, `Video` or `Audio`."""

    kind: str
    start: int
    num_tokens: int
    size: tuple[int, ...]
    source: str | bytes | tuple[str, ...]
    interval: float = 1.0
    framed: bool = False


@dataclass(frozen=True)
class Request:
    """One completion to write.

    Attributes:
        prompt: the prompt's token ids.
        seed: the seed for sampling: the same seed, prompt and weights give the same completion in any batch.
        sampling: how it is sampled.
        conversation: a number that all turns of a conversation share, so that one generator writes them, or None.
        media: the prompt's images and clips, in order.
        rollouts: the number of the rollouts for which the routes are kept; None if nobody needs them.
        routes_from: place of the prompt's first token whose routes are kept: those before it are known.
    """

    prompt: list[int]
    seed: int
    sampling: Sampling
    conversation: int | None = None
    media: tuple[PromptMedia, ...] = ()
    rollouts: int | None = None
    routes_from: int = 0


@dataclass(frozen=True)
class Written:
    """A completion as a worker or server reports it, before the rank has checked it.

    Attributes:
        token_ids: the completion's token ids, with the token that ended it.
        logprobs: the log-probability of each token, under the distribution it was sampled from.
        finish: why the completion ended, in the generator's own word: "stop", "length" or another one.
        oldest, newest: numbers of the oldest and newest weight sync whose weights wrote some of it, if known.
        routes: experts of its and the prompt's tokens, in a form that `read_routes` takes; None if not known.
        num_cached: tokens of its prompt that were not computed again; None if not known.
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
    """Arguments of vllm.LLM, and tokens that end a completion whose request names none."""

    options: dict[str, Any]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Start(Message):
    """The first message, which starts the generator with `VllmSettings` or the settings of the package's own worker.
    `protocol` is the fingerprint of the messages that the rank knows."""

    settings: Any
    protocol: str = field(default_factory=lambda: PROTOCOL)


@dataclass(frozen=True)
class Failure(Message):
    """The process could not do what the rank asked for; `text` is the reason, in one line."""

    text: str


@dataclass(frozen=True)
class Generate(Message):
    """Completions to write. The answers have the same number."""

    number: int
    requests: list[Request]


@dataclass(frozen=True)
class UseVersion(Message):
    """What comes after this is written with a version of published weights, which a generator that has joined reads
    itself. `digest` is the version's hash, and `policy_version` the fleet's number of these weights."""

    version: int
    digest: str
    policy_version: int


@dataclass(frozen=True)
class Finished(Message):
    """A completion, sent as soon as it is written. `place` is its request's place in the `Generate` of this number. A
    process sends a `Written`; its rank sends on what it has made of it."""

    number: int
    place: int
    written: Any


@dataclass(frozen=True)
class Failed(Message):
    """The `Generate` with this number failed as a whole; `text` is the reason."""

    number: int
    text: str


@dataclass(frozen=True)
class Hello(Message):
    """The start of an exchange about weights. Answers to earlier messages about weights no longer count."""

    number: int


@dataclass(frozen=True)
class Call(Message):
    """A thing to do, by its verb.

    Attributes:
        verb: one of `VERBS`.
        arguments: as `VERBS` names them.

    Raises:
        ProtocolError: there is no such verb, or it has other arguments.
    """

    verb: Verb
    arguments: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise ProtocolError(f"there is no verb {self.verb}")
        names, _ = VERBS[self.verb]
        if len(names) != len(self.arguments):
            raise ProtocolError(
                f"{self.verb} takes {', '.join(names) or 'nothing'}, not {len(self.arguments)} arguments"
            )


@dataclass(frozen=True)
class Answer(Message):
    """A call has been carried out, or the process has started; `value` is the result."""

    verb: Verb | Literal["start"]
    value: Any = None


@dataclass(frozen=True)
class Committed:
    """What "commit" and "load_adapter" give: the generator has the weights of this weight sync. `checksums` are those
    of its tensors, if asked for."""

    version: int | None
    checksums: dict[str, int] | None = None


VERBS: dict[Verb, tuple[tuple[str, ...], str]] = {
    # Weights for this package's own generator.
    # Plans of all senders (hf.buckets.Plan); answered if names, shapes and dtypes are those of the generator's tensors.
    "agree": (("plans",), ""),
    # Buffers to share (weight_sync.shared_memory.SharedBuffer). On CUDA the handles are those of the events that say
    # when each buffer has been read.
    "open_buffers": (("buffers",), "handles"),
    # Buffers that the generator allocates for itself, as many as fit.
    "make_room": (("num_bytes", "num_buffers"), "num_buffers"),
    # Links, one for each sender, at the weight_sync.link.Address of their store. Every generator joins all links, under
    # its number from 0. The seconds are the longest wait for a peer.
    "join": (("address", "num_senders", "generator", "num_generators", "seconds"), ""),
    "leave": ((), ""),
    # A sender has filled a shared buffer, the slot, with the bucket of this number in its plan; answered once read.
    "bucket": (("sender", "number", "slot"), "slot"),
    # Buckets come over the links: all, or those that are not frozen. Answered once all have come.
    "receive": (("frozen",), ""),
    # Weights for vLLM: arguments of vLLM's weight transfer.
    "init_transfer": (("info",), ""),
    "load_weights": (("info",), ""),
    # Adapters alone, in PEFT's format in a folder that is there until the answer. Completions that are being written
    # end with the adapter that they began with.
    "load_adapter": (("version", "folder"), "Committed"),
    # Every weight sync: begin, then buckets, receive or load_weights, then commit or give_up. Weights are incomplete in
    # between. The seconds are the longest silence of the rank; sums asks for checksums of the generator's tensors.
    "begin": (("version", "seconds"), ""),
    "commit": (("sums",), "Committed"),
    "give_up": ((), ""),
    # Memory of vLLM: given back once all is written (level 1 keeps weights on the host), and taken again, first for its
    # weights and then for its kv_cache.
    "sleep": (("level",), ""),
    "wake": (("what",), ""),
}
"""What a process may be asked to do: the names of the arguments, and of what is answered."""


def name_of(message: object) -> str:
    """A message's name in errors."""
    return message.verb if isinstance(message, Call | Answer) else type(message).__name__


def receive_start(connection: Connection) -> Start:
    """Receives the first message of a rank.

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
    """The error for a message that its receiver does not handle, or not at this point."""
    return ProtocolError(f"the generator got {name_of(message)}, which it does not know, or not at this point")


OTHER_VERSION = (
    "the rank and its generator's process have different versions of automodel_rl/generator_messages.py: start again"
)


def _fingerprint() -> str:
    """A hash that changes with every name of a message, a message's field, a verb, its arguments and its answer."""
    classes = {name: value for name, value in globals().items() if dataclasses.is_dataclass(value)}
    lines = [f"{name}: {[part.name for part in dataclasses.fields(value)]}" for name, value in classes.items()]
    lines += [f"{verb}: {both}" for verb, both in VERBS.items()]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


PROTOCOL: str = _fingerprint()
"""Fingerprint of the messages that this side knows."""
