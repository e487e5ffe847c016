"""Several engines as one generator."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from automodel_rl.errors import WeightSyncError
from automodel_rl.generator_messages import Answer, Call, Committed, Failure, Message, Request, Sampling
from automodel_rl.generators.protocol import Completion
from automodel_rl.generators.vllm_engines import VllmEngines
from automodel_rl.weight_sync.channel import call


class Engine:
    """Writes each prompt's first token. It answers what it is told to answer."""

    num_workers = 1

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answers: list[Message] = []
        self.sent: list[Message] = []
        self.started = self.closed = 0
        self.warning = "old"
        self.lost: Callable[[BaseException], None] | None = None

    def start(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        meanwhile()
        self.started += 1

    def submit(self, requests: Sequence[Request], on_finished: Any, on_lost: Any) -> Callable[[], list[Completion]]:
        self.requests += requests
        self.lost = on_lost
        found = [Completion(request.prompt[:1], [0.0], "stop") for request in requests]

        def wait() -> list[Completion]:
            for place in reversed(range(len(found))):
                on_finished(place, found[place])
            return found

        return wait

    def close(self) -> None:
        self.closed += 1

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def ready(self) -> bool:
        return bool(self.answers)

    def receive(self) -> Message:
        return self.answers.pop(0)


def request(token: int, conversation: int | None = None) -> Request:
    return Request([token, 7], token, Sampling(3), conversation)


def two() -> tuple[VllmEngines, list[Engine]]:
    engines = [Engine(), Engine()]
    return VllmEngines(engines), engines  # type: ignore[arg-type]


def test_completions_come_in_the_order_of_their_requests() -> None:
    several, engines = two()
    told: list[tuple[int, list[int]]] = []
    tokens = [5, 5, 1, 2, 2, 3]
    wait = several.submit([request(token) for token in tokens], lambda place, c: told.append((place, c.token_ids)))
    assert [completion.token_ids for completion in wait()] == [[token] for token in tokens]
    assert sorted(told) == [(place, [token]) for place, token in enumerate(tokens)]
    assert all(engine.requests for engine in engines)


def test_a_prompt_goes_to_one_engine_and_prompts_are_shared_evenly() -> None:
    several, engines = two()
    several.submit([request(token) for token in range(1, 9) for _ in range(4)])
    prompts = [[request.prompt[0] for request in engine.requests] for engine in engines]
    assert len(prompts[0]) == len(prompts[1]) == 16
    assert not set(prompts[0]) & set(prompts[1])


def test_what_an_engine_still_writes_counts() -> None:
    several, engines = two()
    several.submit([request(1)] * 5)
    several.submit([request(token) for token in (2, 3, 4)])
    assert [len(engine.requests) for engine in engines] == [5, 3]


def test_turns_of_a_conversation_go_to_one_engine() -> None:
    several, engines = two()
    for token in range(1, 5):
        several.submit([request(token, conversation=3)])
    assert [len(engine.requests) for engine in engines] == [0, 4]


def test_it_is_lost_once_if_engines_are() -> None:
    several, engines = two()
    told: list[BaseException] = []
    several.submit([request(1), request(2)], lambda *_: None, told.append)
    for engine in engines:
        assert engine.lost is not None
        engine.lost(RuntimeError("gone"))
    assert len(told) == 1


def test_all_engines_start_and_get_weights() -> None:
    several, engines = two()
    compiled: list[int] = []
    several.start(lambda: compiled.append(1))
    assert compiled == [1]
    assert [engine.started for engine in engines] == [1, 1]
    for engine in engines:
        engine.answers.append(Answer("commit", Committed(4)))
    assert call(several, "commit", False, seconds=1.0) == Committed(4)
    assert all(engine.sent == [Call("commit", (False,))] for engine in engines)


def test_a_weight_sync_fails_if_one_engine_fails() -> None:
    several, engines = two()
    engines[0].answers.append(Answer("load_weights"))
    assert not several.ready()
    engines[1].answers.append(Failure("no room"))
    with pytest.raises(WeightSyncError, match="no room"):
        call(several, "load_weights", {}, seconds=1.0)


def test_if_one_does_not_start_all_are_closed() -> None:
    several, engines = two()
    engines[1].start = lambda: (_ for _ in ()).throw(RuntimeError("no memory"))  # type: ignore[method-assign,misc]
    with pytest.raises(RuntimeError, match="no memory"):
        several.start()
    assert [engine.closed for engine in engines] == [1, 1]
