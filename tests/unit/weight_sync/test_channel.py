"""A rank's talk with its generator: which answers are taken, and what is let go when nobody answers."""

import queue
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from automodel_rl.config import ParallelConfig
from automodel_rl.errors import WeightSyncError
from automodel_rl.generator_messages import Answer, Call, Failure, Hello, Message, ProtocolError
from automodel_rl.weight_sync.channel import expect, handshake
from automodel_rl.weight_sync.collective import CollectiveTransport
from automodel_rl.weight_sync.generator_end import GeneratorEnd
from automodel_rl.weight_sync.receiver import Receiver


class Scripted:
    """A channel whose answers are known before; `gone` once there are none."""

    def __init__(self, *answers: Message, greeted: bool = False):
        self.answers, self.greeted = deque(answers), greeted
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)
        if self.greeted and isinstance(message, Hello):
            self.answers.insert(len(self.answers) - 1, message)

    def ready(self) -> bool:
        if not self.answers:
            raise WeightSyncError("the generator is gone")
        return True

    def receive(self) -> Message:
        return self.answers.popleft()


def test_an_answer_of_another_kind_and_a_failure_are_errors() -> None:
    assert expect(Scripted(Answer("bucket", 3)), "bucket", 1.0) == 3
    with pytest.raises(WeightSyncError, match="the generator answered load_weights instead of init_transfer"):
        expect(Scripted(Answer("load_weights")), "init_transfer", 1.0)
    with pytest.raises(WeightSyncError, match="the generator answered Hello instead of commit"):
        expect(Scripted(Hello(1)), "commit", 1.0)
    with pytest.raises(WeightSyncError, match="^no room$"):
        expect(Scripted(Failure("no room")), "allocate_buffers", 1.0)
    with pytest.raises(WeightSyncError, match="the generator is gone"):
        expect(Scripted(), "commit", 1.0)


@pytest.mark.parametrize(
    ("verb", "arguments"), [("comit", (True,)), ("commit", ()), ("leave", (1,)), ("bucket", (1, 2))]
)
def test_a_call_is_one_of_the_known_verbs_with_its_arguments(verb: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError, match=f"{verb} takes|unknown verb {verb}"):
        Call(verb, arguments)


def test_a_greeting_passes_over_what_is_left_of_the_sync_before() -> None:
    channel = Scripted(Answer("bucket", 0), Failure("the sync before"), Answer("agree"), greeted=True)
    handshake(channel, [], 1.0)
    assert channel.sent[1:] == [Call("agree", ([],))]
    assert not channel.answers


class Gone:
    def send(self, message: Message) -> None:
        raise WeightSyncError("its process exited with code -9")

    def ready(self) -> bool:
        raise WeightSyncError("its process exited with code -9")

    def receive(self) -> Message:
        raise AssertionError


class FakeLink:
    closed = False

    def close(self, *, broken: bool) -> None:
        self.closed = broken


def test_links_are_closed_though_the_generator_is_gone() -> None:
    meshes = SimpleNamespace(components=None, encoders={})
    handle: Any = SimpleNamespace(layout=SimpleNamespace(parallel=ParallelConfig()), components=[], meshes=meshes)
    transport, link, store = CollectiveTransport(Gone(), handle, 1.0), FakeLink(), torch.distributed.HashStore()
    transport.links[0], transport.store = link, store  # type: ignore[assignment]
    transport.close()
    assert link.closed
    assert not transport.links
    assert transport.store is None


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (Call("bucket", (0, 0, 0)), None),  # left of a weight sync that has failed
        (Call("receive", (True,)), None),
        (Call("commit", (False,)), None),
        (Call("abort"), None),
        (Call("leave"), Answer("leave")),
        (Hello(3), Hello(3)),
        (Call("sleep", (2,)), "ProtocolError: the generator received an unknown or unexpected message: sleep"),
        (
            Call("load_weights", ({},)),
            "ProtocolError: the generator received an unknown or unexpected message: load_weights",
        ),
    ],
    ids=str,
)
def test_a_generator_answers_what_is_due_outside_of_a_weight_sync(message: Message, answer: Any) -> None:
    answers: list[Message] = []
    end = GeneratorEnd(Receiver({}), torch.device("cpu"), queue.Queue(), answers.append)
    end.handle(message)
    assert answers == ([] if answer is None else [Failure(answer) if isinstance(answer, str) else answer])


def test_a_verb_of_another_generator_ends_a_weight_sync() -> None:
    answers: list[Message] = []
    messages: queue.Queue[Message] = queue.Queue()
    messages.put(Call("wake", ("weights",)))
    GeneratorEnd(Receiver({}), torch.device("cpu"), messages, answers.append).handle(Call("begin", (1, 5.0)))
    assert answers == [Failure("ProtocolError: the generator received an unknown or unexpected message: wake")]
