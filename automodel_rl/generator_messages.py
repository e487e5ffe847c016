"""Messages between a rank and the process of its generator.

They are pickled for the pipe of `generators/child_process.py`. This file imports only the standard library: vLLM's
worker loads it by its path, in an environment that has nothing else of this package.

    a rank sends      the process answers
    Start             an Answer to "start", with a line for the console, or empty
    Generate          Finished for each completion, as soon as it is written, or Failed
    Hello             Hello, with the same number
    Call              an Answer to its verb; none to "begin" and "give_up"

A `Call` is one of `VERBS` with its arguments. `Failure` may replace any answer, except the answers to Generate.
"""

import dataclasses
import hashlib
import pickle
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


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
            ended_by |= {"stop": [*self.stop], "include_stop_str_in_output": True}
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


@dataclass(frozen=True)
class Request:
    """One completion to write.

    Attributes:
        prompt: the prompt's token ids.
        seed: the seed for sampling: the same seed, prompt and weights give the same completion in any batch.
        sampling: how it is sampled.
        conversation: a number that all turns of a conversation share, so that one server writes them, or None.
        media: the prompt's images and clips, in order.
    """

    prompt: list[int]
    seed: int
    sampling: Sampling
    conversation: int | None = None
    media: tuple[PromptMedia, ...] = ()


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
class Finished(Message):
    """A completion, sent as soon as it is written. `place` is its request's place in the `Generate` of this number."""

    number: int
    place: int
    written: Written


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

    verb: str
    arguments: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        names = VERBS.get(self.verb)
        if names is None or len(names) != len(self.arguments):
            raise ProtocolError(f"{self.verb} takes {names}, not {len(self.arguments)} arguments")


@dataclass(frozen=True)
class Answer(Message):
    """The thing of this verb is done; `value` is what it gives."""

    verb: str
    value: Any = None


@dataclass(frozen=True)
class Committed:
    """What "commit" and "load_adapter" give: the generator has the weights of this weight sync. `checksums` are those
    of its tensors, if asked for."""

    version: int | None
    checksums: dict[str, int] | None = None


VERBS: dict[str, tuple[str, ...]] = {
    # Weights for this package's own generator.
    "agree": ("plans",),  # hf.buckets.Plan of each sender; answered if names, shapes and dtypes are the generator's
    "open_buffers": ("buffers",),  # weight_sync.shared_memory.SharedBuffer of each; gives handles of CUDA events
    "make_room": ("num_bytes", "num_buffers"),  # to allocate; gives the number of buffers that fit
    # A link for each sender, at the weight_sync.link.Address of their store; generators count from 0.
    "join": ("address", "num_senders", "generator", "num_generators", "seconds"),
    "leave": (),  # closes all links
    "bucket": ("sender", "number", "slot"),  # a shared buffer holds this bucket; gives the slot, once it is read
    "receive": ("frozen",),  # buckets come over the links: all, or those that are not frozen
    # Weights for vLLM, by its own weight transfer.
    "init_transfer": ("info",),  # connects its workers to the sender
    "load_weights": ("info",),
    # Adapters alone, in PEFT's format; completions that are being written end with those that they began with.
    "load_adapter": ("version", "folder"),  # gives Committed
    # Of every weight sync.
    "begin": ("version", "seconds"),  # weights are incomplete from here on; the longest silence of the rank
    "commit": ("sums",),  # all weights are sent; gives Committed, with checksums if asked for
    "give_up": (),  # the end without a commit
    # Memory of vLLM.
    "sleep": ("level",),  # gives it back once all is written; level 1 keeps weights on the host
    "wake": ("what",),  # takes it again: for its weights, and after those for its kv_cache
}
"""What a process may be asked to do, with the names of the arguments."""


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
    name = message.verb if isinstance(message, Call) else type(message).__name__
    return ProtocolError(f"the generator got {name}, which it does not know, or not at this point")


OTHER_VERSION = (
    "the rank and its generator's process have different versions of automodel_rl/generator_messages.py: start again"
)


def _fingerprint() -> str:
    """A hash that changes with every name of a message, of a message's field, of a verb and of its arguments."""
    classes = {name: value for name, value in globals().items() if dataclasses.is_dataclass(value)}
    lines = [f"{name}: {[part.name for part in dataclasses.fields(value)]}" for name, value in classes.items()]
    lines += [f"{verb}{arguments}" for verb, arguments in VERBS.items()]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


PROTOCOL: str = _fingerprint()
"""Fingerprint of the messages that this side knows."""
